// The head map, and what is known of the head chosen in it.
const SCORE_NAMES = { variance: 'Variance', forward_kl: 'Forward KL' };
const scoreName = (name) => SCORE_NAMES[name] || name.replace(/_/g, ' ').replace(/^./, (c) => c.toUpperCase());
const key = (l, h) => `${l},${h}`;

function headMap(freeze) {
  const map = document.getElementById('map');
  const names = Object.keys(freeze.scores);
  const frozen = new Set(freeze.frozen.map(([l, h]) => key(l, h)));
  const first = freeze.frozen[0] || [0, 0];
  const state = { freeze, frozen, score: names[0], ranks: {}, chosen: first, view: 'all' };
  for (const name of names) state.ranks[name] = ranks(freeze.scores[name]);
  const controls = [];
  if (names.length > 1) {
    controls.push(segmented('Coloured by', names.map((value) => ({ value, label: scoreName(value) })), (value) => {
      state.score = value;
      colour(state);
      detail(state);
    }));
  }
  if (DATA.freezes.length > 1) controls.push(runChoice(freeze));
  document.getElementById('map-controls').replaceChildren(...controls);
  const heads = document.querySelector('.heads');
  heads.classList.toggle('bare', !freeze.patterns && !freeze.marginals);
  if (freeze.colour === 'frozen') heads.style.removeProperty('--frozen'); else heads.style.setProperty('--frozen', armColor(freeze));
  document.getElementById('map-intro').textContent = introduction(freeze);
  map.replaceChildren(grid(state));
  headTable(state);
  colour(state);
  choose(state, first, false);
  repaint = () => { colour(state); detail(state); };
}

// A state of a head in the words of what was done to it; the names of styles stay.
const inWords = (freeze, state, l, h) => (freeze.pruned.some(([layer, head]) => layer === l && head === h) ? state.replace('frozen', 'pruned') : state);

// How many heads have a score, and so a rank: those that were live.
const ranked = (freeze) => freeze.scores[freeze.score_name].flat().filter((value) => value !== null).length;

function introduction(f) {
  const lowest = scoreName(f.score_name).toLowerCase();
  const measured = f.num_sequences ? `, measured on ${whole(f.num_sequences)} sequences of ${whole(f.length)} tokens` : '';
  const refused = Object.keys(f.rejected).length;
  const limit = f.config.max_fit_kl ? ` (more than ${f.config.max_fit_kl} nats)` : '';
  const turned = refused ? ` ${refused === 1 ? 'One head' : `${refused} heads`} scored low enough but fitted too badly${limit} and stayed live.` : '';
  const before = f.scores[f.score_name].flat().filter((value) => value === null).length;
  const live = before ? ' among those still live' : '';
  const named = Boolean(f.config.heads);
  const which = named ? 'that were named' : `with the lowest ${lowest}${live}${measured},`;
  const kinds = Object.keys(f.earlier).filter((kind) => f.earlier[kind]);
  const ofOne = `${before === 1 ? 'One head was' : `${before} heads were`} ${kinds[0]} earlier.`;
  const earlier = before ? ` ${kinds.length > 1 ? `The model had ${f.told_earlier} heads before.` : ofOne}` : '';
  if (f.kind === 'pruned') {
    return `Each square is one head of the model. The ${f.frozen.length} of ${f.layers * f.heads} heads ${which} were removed: `
      + `from then on the model does without them.${earlier} Choose a square to see that head.`;
  }
  if (f.counts.pruned) {
    return `Each square is one head of the model. Of its ${f.layers * f.heads} heads those ${named ? 'that were named' : `with the lowest ${lowest} among the live ones${measured},`} are ${f.told}: `
      + `frozen heads use one fixed pattern from then on, and pruned ones were removed.${turned}${earlier} Choose a square to see that head.`;
  }
  return `Each square is one head of the model. The ${f.frozen.length} of ${f.layers * f.heads} heads ${which} ${named ? '' : 'attend almost the same way whatever they read; from then on they '}`
    + `use one fixed pattern${named ? ' from then on' : ''}.${turned}${earlier}${f.patterns ? '' : ' The patterns themselves were not kept beside this run.'} Choose a square to see that head.`;
}

function runChoice(freeze) {
  const select = el('select', { id: 'run-choice', onchange: (e) => headMap(DATA.freezes[e.target.value]) },
    DATA.freezes.map((f, i) => el('option', { value: i, text: f.name })));
  select.value = DATA.freezes.indexOf(freeze);
  return el('label', { class: 'run-choice', text: 'Run ' }, [select]);
}

function ranks(scores) {
  const flat = scores.flatMap((row, l) => row.map((value, h) => [value, l, h])).filter(([v]) => v !== null);
  flat.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  return Object.fromEntries(flat.map(([, l, h], i) => [key(l, h), i + 1]));
}

function grid(state) {
  const { freeze } = state;
  const [cell, gap, left, top, right] = [freeze.heads <= 8 ? 46 : 33, 6, 26, 36, 40];
  const width = left + freeze.heads * (cell + gap) + right;
  const height = top + freeze.layers * (cell + gap);
  const head = Array.from({ length: freeze.heads }, (_, h) => svg('text', { class: 'tick', x: left + h * (cell + gap) + cell / 2, y: top - 8, 'text-anchor': 'middle', text: h }));
  const rows = Array.from({ length: freeze.layers }, (_, l) => {
    const y = top + l * (cell + gap);
    const count = freeze.frozen.filter(([at]) => at === l).length;
    const cells = Array.from({ length: freeze.heads }, (_, h) => square(state, l, h, left + h * (cell + gap), y, cell));
    return svg('g', { role: 'row', 'aria-label': `Layer ${l}` }, [
      svg('text', { class: 'tick', x: left - 8, y: y + cell / 2 + 4, 'text-anchor': 'end', text: l, 'aria-hidden': true }),
      ...cells,
      svg('text', { class: count ? 'count' : 'count none', x: width - right + 8, y: y + cell / 2 + 4, text: count || '·', 'aria-hidden': true }),
    ]);
  });
  const labels = [
    svg('text', { class: 'x-title', x: left, y: 11, text: 'head →, layer ↓' }),
    svg('text', { class: 'x-title', x: width, y: 11, 'text-anchor': 'end', text: freeze.kind }),
  ];
  const frame = svg('svg', { class: 'headmap', viewBox: `0 0 ${width} ${height}`, role: 'grid', 'aria-label': 'Heads, a row for each layer. Arrow keys move between heads.', style: `max-width:${width * 1.3}px` },
    [svg('g', { 'aria-hidden': true }, [...labels, ...head]), ...rows]);
  frame.addEventListener('keydown', (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const clamp = (v, n) => Math.min(Math.max(v, 0), n - 1);
    choose(state, [clamp(state.chosen[0] + move[0], freeze.layers), clamp(state.chosen[1] + move[1], freeze.heads)], true);
  });
  return frame;
}

function square(state, l, h, x, y, size) {
  const rejected = key(l, h) in state.freeze.rejected;
  const c = size / 2;
  const mark = [];
  if (state.frozen.has(key(l, h))) {
    for (const turn of [0, 60, 120]) mark.push(svg('line', { class: 'flake', x1: c, x2: c, y1: c - 8, y2: c + 8, transform: `rotate(${turn} ${c} ${c})` }));
  } else if (rejected) {
    for (const turn of [45, -45]) mark.push(svg('line', { class: 'flake', x1: c, x2: c, y1: c - 8, y2: c + 8, transform: `rotate(${turn} ${c} ${c})` }));
  }
  const kind = headState(state, l, h);
  return svg('g', {
    class: `cell ${kind}`, transform: `translate(${x} ${y})`, role: 'gridcell', tabindex: -1, id: `head-${l}-${h}`,
    onclick: () => choose(state, [l, h], true), onfocus: () => { if (key(...state.chosen) !== key(l, h)) choose(state, [l, h], false); },
  }, [svg('rect', { class: 'frame', x: -2, y: -2, width: size + 4, height: size + 4, rx: 5 }), svg('rect', { class: 'body', width: size, height: size, rx: 3 }), ...mark]);
}

function headState(state, l, h) {
  if (state.frozen.has(key(l, h))) return 'frozen';
  if (key(l, h) in state.freeze.rejected) return 'rejected';
  return state.freeze.scores[state.freeze.score_name][l][h] === null ? 'frozen earlier' : 'live';
}

function colour(state) {
  const values = state.freeze.scores[state.score];
  const [low, high] = extent(values.flat());
  const kind = low > 0 && high / low > 4 ? 'log' : 'linear';
  const place = scale(kind, [low, high], [0, 1]);
  const stops = ramp('--score-ramp');
  values.forEach((row, l) => row.forEach((value, h) => {
    const cell = document.getElementById(`head-${l}-${h}`);
    const rgb = value === null ? null : mix(stops, place(value));
    cell.querySelector('.body').style.fill = rgb ? css(rgb) : 'transparent';
    cell.querySelectorAll('.flake').forEach((line) => { line.style.stroke = rgb && luminance(rgb) < 0.5 ? '#fff' : '#08222f'; });
    const rank = value === null ? '' : `, rank ${state.ranks[state.score][key(l, h)]} of ${ranked(state.freeze)}`;
    cell.setAttribute('aria-label', `Layer ${l}, head ${h}: ${inWords(state.freeze, headState(state, l, h), l, h)}, ${scoreName(state.score)} ${short(value)}${rank}`);
  }));
  legend(state, stops, low, high, kind);
  rankPlot(state, kind);
}

function legend(state, stops, low, high, kind) {
  const bar = el('span', { class: 'bar', style: `background:linear-gradient(90deg,${stops.map(css).join(',')})` });
  const before = Object.keys(state.freeze.earlier).filter((name) => state.freeze.earlier[name]);
  const kinds = [
    ['frozen', state.freeze.kind],
    ...(Object.keys(state.freeze.rejected).length ? [['rejected', 'fit rejected, stayed live']] : []),
    ...(before.length ? [['earlier', `${before.join(' or ')} earlier, not ranked`]] : []),
    ['live', 'live'],
  ];
  document.getElementById('map-legend').replaceChildren(
    el('div', { class: 'ramp' }, [el('span', { text: short(low, 2) }), bar, el('span', { text: short(high, 2) })]),
    el('p', { class: 'ramp-name', text: `${scoreName(state.score)}${kind === 'log' ? ', log scale' : ''}: steady on the left, changing with the text on the right` }),
    el('ul', { class: 'marks' }, kinds.map(([kind, label]) => el('li', {}, [swatch(kind), el('span', { text: label })]))),
  );
}

function swatch(kind) {
  const turns = { frozen: [0, 60, 120], rejected: [45, -45], earlier: [], live: [] }[kind];
  return svg('svg', { viewBox: '0 0 20 20', width: 18, height: 18, class: `swatch ${kind}`, 'aria-hidden': true }, [
    svg('rect', { class: 'frame', x: 1, y: 1, width: 18, height: 18, rx: 4 }), svg('rect', { class: 'body', x: 3, y: 3, width: 14, height: 14, rx: 2 }),
    ...turns.map((turn) => svg('line', { class: 'flake', x1: 10, x2: 10, y1: 5, y2: 15, transform: `rotate(${turn} 10 10)` })),
  ]);
}

function choose(state, head, focus) {
  const before = document.getElementById(`head-${state.chosen.join('-')}`);
  const now = document.getElementById(`head-${head.join('-')}`);
  set(before, { tabindex: -1, 'aria-selected': 'false' });
  set(now, { tabindex: 0, 'aria-selected': 'true' });
  state.chosen = head;
  markRank(state);
  if (focus) now.focus({ preventScroll: true });
  detail(state);
}

function headTable(state) {
  const { freeze } = state;
  const names = Object.keys(freeze.scores);
  const head = el('tr', {}, ['Head', 'State', ...names.map(scoreName), 'Rank', 'Fit KL, nats'].map((text) => el('th', { scope: 'col', text })));
  const order = freeze.scores[names[0]].flatMap((row, l) => row.map((_, h) => [l, h]))
    .sort((a, b) => (state.ranks[names[0]][key(...a)] || 0) - (state.ranks[names[0]][key(...b)] || 0));
  const rows = order.map(([l, h]) => el('tr', {}, [
    el('th', { scope: 'row', text: `layer ${l}, head ${h}` }), el('td', { text: inWords(freeze, headState(state, l, h), l, h) }),
    ...names.map((name) => el('td', { text: short(freeze.scores[name][l][h]) })),
    el('td', { text: state.ranks[names[0]][key(l, h)] ?? '–' }),
    el('td', { text: short(freeze.fit_kl[key(l, h)] ?? freeze.rejected[key(l, h)]) }),
  ]));
  document.getElementById('head-table').replaceChildren(el('div', { class: 'scroll' }, [el('table', {}, [el('thead', {}, [head]), el('tbody', {}, rows)])]));
}
