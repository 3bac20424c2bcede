// One head: its numbers, its curves, and its pattern as a picture.
const PICTURE = 320;
const ZOOM = 128;

function detail(state) {
  const { freeze, chosen: [l, h] } = state;
  const kind = headState(state, l, h);
  const fitted = freeze.patterns && freeze.patterns.curves[key(l, h)];
  const host = document.getElementById('detail');
  const parts = [
    el('h3', {}, [el('span', { text: `Layer ${l}, head ${h}` }), el('span', { class: `badge ${kind.split(' ')[0]}`, text: kind === 'rejected' ? 'fit rejected' : inWords(freeze, kind, l, h) })]),
    numbers(state, l, h),
  ];
  const charts = el('div', { class: 'curves' });
  if (fitted) parts.push(picture(state, fitted));
  parts.push(charts);
  host.replaceChildren(...parts);
  document.getElementById('status').textContent = document.getElementById(`head-${l}-${h}`).getAttribute('aria-label');
  for (const chart of fitted ? fittedCharts(freeze, fitted, l, h) : measuredCharts(freeze, l, h)) {
    const box = el('div', { class: 'curve' });
    charts.append(box);
    lineChart(box, [chart.series], chart.options);
  }
  if (!fitted && (kind !== 'frozen' || freeze.marginals)) host.append(el('p', { class: 'aside', text: WITHOUT_PATTERN[inWords(freeze, kind, l, h)] + (freeze.marginals ? ' Shown is its mean attention over the calibration text.' : '') }));
}

const WITHOUT_PATTERN = {
  pruned: 'This head is pruned: it is not computed any more.',
  'pruned earlier': 'This head was pruned before this event.',
  frozen: 'This head is frozen, but its pattern was not kept in the folder of this run.',
  'frozen earlier': 'This head was frozen before this event, so its pattern is not among those chosen here.',
  rejected: 'No compact pattern describes this head closely enough, so it goes on computing attention.',
  live: 'This head goes on computing attention from what it reads, so it has no fixed pattern.',
};

function numbers(state, l, h) {
  const { freeze } = state;
  const total = ranked(freeze);
  const rows = Object.keys(freeze.scores).map((name) => {
    const rank = state.ranks[name][key(l, h)];
    return [scoreName(name), short(freeze.scores[name][l][h]), rank ? `rank ${rank} of ${total}` : ''];
  });
  const kl = freeze.fit_kl[key(l, h)] ?? freeze.rejected[key(l, h)];
  if (kl !== undefined) rows.push(['Fit KL', `${short(kl)} nats`, 'lost by the compact form']);
  if (freeze.entropy) rows.push(['Row entropy', `${short(freeze.entropy[l][h])} nats`, '']);
  return el('dl', { class: 'facts' }, rows.map(([name, value, note]) => el('div', {}, [
    el('dt', { text: name }), el('dd', { text: value }), note ? el('dd', { class: 'small', text: note }) : null])));
}

function fittedCharts(freeze, fitted, l, h) {
  const x = freeze.patterns.position;
  const line = (name) => ({ name: '', color: 'var(--frozen)', x, y: fitted[name].mean, low: fitted[name].low, high: fitted[name].high });
  const common = { height: 170, xKind: 'log1p', left: 42, minSpan: 1 };
  return [
    { series: line('rho'), options: { ...common, yLabel: 'ρ(δ), nats: weight by distance', xLabel: 'tokens back, log scale', xName: 'δ', label: `rho of layer ${l}, head ${h}` } },
    { series: line('alpha'), options: { ...common, yLabel: 'α(j), nats: weight by key position', xLabel: 'key position, log scale', xName: 'j', label: `alpha of layer ${l}, head ${h}` } },
  ];
}

function measuredCharts(freeze, l, h) {
  if (!freeze.marginals) return [];
  const x = freeze.marginals.position;
  const line = (name) => ({ name: '', color: 'var(--live)', x, y: freeze.marginals[name][l][h] });
  const common = { height: 190, xKind: 'log1p', yKind: 'log', left: 64 };
  return [
    { series: line('by_distance'), options: { ...common, yLabel: 'Mean attention by distance', xLabel: 'tokens back, log scale', xName: 'δ', label: `mean attention by distance of layer ${l}, head ${h}` } },
    { series: line('by_key'), options: { ...common, yLabel: 'Mean attention by key position', xLabel: 'key position, log scale', xName: 'j', label: `mean attention by key of layer ${l}, head ${h}` } },
  ];
}

// P(i, j) = exp(alpha(j) + rho(i - j) - log Z(i)) on a coarse raster, coloured by its logarithm.
function picture(state, fitted) {
  const { freeze } = state;
  const canvas = el('canvas', { width: PICTURE, height: PICTURE, role: 'img', 'aria-label': 'The fixed pattern: queries downwards, keys to the right, brighter for more attention' });
  const note = el('p', { class: 'small' });
  const scaleBar = el('div', { class: 'ramp small' });
  const paint = (view) => {
    state.view = view;
    const span = view === 'all' ? freeze.length : Math.min(ZOOM, freeze.length);
    const [low, high] = paintPattern(canvas, freeze.patterns.position, fitted, span);
    const stops = ramp('--heat-ramp');
    scaleBar.replaceChildren(el('span', { text: short(10 ** low, 1) }), el('span', { class: 'bar', style: `background:linear-gradient(90deg,${stops.map(css).join(',')})` }), el('span', { text: short(10 ** high, 1) }));
    note.textContent = `Query i downwards, key j to the right, ${whole(span)} × ${whole(span)} tokens; share of attention, log scale.`;
  };
  const parts = [canvas, scaleBar, note];
  if (freeze.length > 2 * ZOOM) {
    const options = [{ value: 'all', label: `All ${whole(freeze.length)}` }, { value: 'first', label: `First ${ZOOM}` }];
    parts.unshift(segmented('Pattern P(i, j)', options, paint, state.view));
  } else parts.unshift(el('p', { class: 'axis-title', text: 'Pattern P(i, j)' }));
  paint(freeze.length > 2 * ZOOM ? state.view : 'all');
  return el('div', { class: 'picture' }, parts);
}

function paintPattern(canvas, position, fitted, span) {
  const size = Math.min(PICTURE, span);
  set(canvas, { width: size, height: size });
  const step = span / size;
  const sample = (values) => Float64Array.from({ length: size + 1 }, (_, i) => interpolate(position, values, Math.min(i * step, span - 1)));
  const [alpha, rho, logZ] = [fitted.alpha.mean, fitted.rho.mean, fitted.log_z].map(sample);
  const value = (i, j) => (alpha[j] + rho[i - j] - logZ[i]) / Math.LN10;
  const seen = [];
  for (let i = 0; i < size; i += 3) for (let j = 0; j <= i; j += 3) seen.push(value(i, j));
  seen.sort((a, b) => a - b);
  const high = seen[Math.floor(0.995 * (seen.length - 1))];
  const low = Math.max(seen[Math.floor(0.02 * (seen.length - 1))], high - 4);
  const stops = ramp('--heat-ramp');
  const colours = Array.from({ length: 256 }, (_, k) => mix(stops, k / 255));
  const context = canvas.getContext('2d');
  const image = context.createImageData(size, size);
  for (let i = 0; i < size; i += 1) {
    for (let j = 0; j <= i; j += 1) {
      const t = Math.min(Math.max((value(i, j) - low) / (high - low || 1), 0), 1);
      image.data.set([...colours[Math.round(t * 255)], 255], 4 * (i * size + j));
    }
  }
  context.putImageData(image, 0, 0);
  return [low, high];
}

function interpolate(x, y, at) {
  let [a, b] = [0, x.length - 1];
  if (at <= x[0]) return y[0];
  if (at >= x[b]) return y[b];
  while (b - a > 1) { const m = (a + b) >> 1; if (x[m] <= at) a = m; else b = m; }
  return y[a] + ((y[b] - y[a]) * (at - x[a])) / (x[b] - x[a]);
}
