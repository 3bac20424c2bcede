// Training curves; then everything is put on the page.
function lossChart() {
  const host = document.getElementById('loss');
  if (!host) return;
  const events = DATA.arms.filter((a) => a.freeze_update !== null);
  const state = { yKind: 'linear', range: 'late' };
  const chart = el('div', { class: 'figure' });
  const draw = () => {
    const arms = DATA.arms.filter((a) => a.smooth.x.length);
    const last = Math.max(...arms.flatMap((a) => a.smooth.x.slice(-1)));
    const first = Math.min(...arms.map((a) => a.smooth.x[0]));
    const event = events.length ? Math.min(...events.map((a) => a.freeze_update)) : last / 2;
    const from = { all: first, late: first + (last - first) * 0.1, after: Math.max(first, event - (last - event) * 0.1) }[state.range];
    const lines = arms.flatMap((a) => [
      { ...a.raw, color: armColor(a), faint: true },
      { ...a.smooth, name: a.name, color: armColor(a) },
      ...(a.probes.x.length ? [{ ...a.probes, color: armColor(a), faint: true, points: true }] : []),
    ]);
    const markers = eventMarkers(events);
    lineChart(chart, lines, {
      height: 320, yKind: state.yKind, xDomain: [from, last], markers, yLabel: 'Training loss, nats per token', xLabel: 'update', xName: 'Update',
      format: (v) => v.toFixed(4), label: 'Training loss by update',
    });
  };
  const ranges = [{ value: 'late', label: 'Without warm-up' }, { value: 'all', label: 'Whole run' }];
  if (events.length) ranges.push({ value: 'after', label: 'After freezing' });
  const probes = DATA.arms.some((a) => a.probes.x.length);
  host.replaceChildren(
    el('div', { class: 'controls' }, [
      segmented('Updates', ranges, (v) => { state.range = v; draw(); }),
      segmented('Loss axis', [{ value: 'linear', label: 'Linear' }, { value: 'log', label: 'Log' }], (v) => { state.yKind = v; draw(); }),
    ]),
    chart,
    el('p', { class: 'small', text: `Lines are moving means over ${whole(DATA.arms[0].window)} updates, the faint lines behind them the updates themselves.${probes ? ' Circles are losses on the controller’s held-out text.' : ''}` }),
  );
  draw();
}

// One mark an update that had events; the first is named, and each tells what happened there and why.
function eventMarkers(arms) {
  const told = new Map(arms.map((a) => [a.freeze_update, []]));
  for (const a of arms) {
    for (const e of a.events) told.set(e.update, [...(told.get(e.update) || []), `${arms.length > 1 ? `${a.name}: ` : ''}${e.told}`]);
  }
  return [...told].sort((one, other) => one[0] - other[0])
    .map(([x, lines], i) => ({ x, label: i ? '' : `heads ${arms.some((a) => a.made !== 'pruned' && a.events.length) ? 'frozen' : 'pruned'}`, title: [`Update ${whole(x)}`, ...lines].join('\n') }));
}

function gapChart() {
  const host = document.getElementById('gap');
  if (!host || !DATA.gaps.length) return;
  const chart = el('div', { class: 'figure' });
  const kinds = [...new Set(DATA.gaps.map((g) => g.kind))].join(' or ');
  const lines = DATA.gaps.flatMap((g) => [{ ...g.raw, color: armColor(g), faint: true }, { ...g.smooth, name: g.name, color: armColor(g) }]);
  host.replaceChildren(
    el('h3', { text: `The same batches, with and without ${kinds} heads` }),
    el('p', { class: 'intro', text: 'All arms read the same text in the same order, so most noise cancels in the difference. Above zero, the other arm does worse than the ordinary one.' }),
    chart,
    el('p', { class: 'small', text: `${kinds[0].toUpperCase()}${kinds.slice(1)} minus ordinary training loss; the line is a centred mean over ${whole(DATA.gaps[0].window)} updates.` }),
  );
  lineChart(chart, lines, {
    height: 240, zero: true, yLabel: 'Difference in training loss, nats per token', xLabel: 'update', xName: 'Update',
    format: (v) => `${v > 0 ? '+' : ''}${v.toFixed(4)}`.replace('-', '−'), label: 'Difference in training loss by update', focus: true,
  });
}

document.body.append(el('p', { id: 'status', class: 'hidden', role: 'status' }));
if (DATA.freezes.length) headMap(DATA.freezes[0]);
lossChart();
gapChart();
