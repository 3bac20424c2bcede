// All heads from the steadiest to the most changeable, with the ones that froze: where the line was drawn.
const RANK_HEIGHT = 170;

function rankPlot(state, kind) {
  const host = document.getElementById('rank');
  const frame = svg('svg', { role: 'img', 'aria-label': `${scoreName(state.score)} of every head, in order. The table below holds the values.` });
  host.replaceChildren(el('p', { class: 'axis-title', text: `${scoreName(state.score)} of every head, in order` }), frame);
  const draw = () => drawRanks(state, frame, kind);
  if (state.observer) state.observer.disconnect();
  state.observer = new ResizeObserver(draw);
  state.observer.observe(host);
  draw();
}

function drawRanks(state, frame, kind) {
  const values = state.freeze.scores[state.score];
  const order = Object.entries(state.ranks[state.score]).sort((a, b) => a[1] - b[1]);
  const width = Math.max(220, frame.parentNode.clientWidth || 500);
  const at = (name) => { const [l, h] = name.split(',').map(Number); return values[l][h]; };
  const [low, high] = extent(order.map(([name]) => at(name)));
  const x = scale('linear', [1, order.length], [66, width - 10]);
  const y = scale(kind, [low, high], [RANK_HEIGHT - 30, 10]);
  set(frame, { viewBox: `0 0 ${width} ${RANK_HEIGHT}`, width, height: RANK_HEIGHT });
  const ticks = y.ticks(4).flatMap((v) => [
    svg('line', { class: 'grid', x1: 66, x2: width - 10, y1: y(v), y2: y(v) }),
    svg('text', { class: 'tick', x: 60, y: y(v) + 4, 'text-anchor': 'end', text: short(v, 2) }),
  ]);
  const radius = Math.min(4, Math.max(1.5, (width - 76) / order.length / 1.6));
  const dots = order.map(([name, rank]) => {
    const [l, h] = name.split(',').map(Number);
    const dot = svg('circle', { class: `dot ${headState(state, l, h)}`, cx: x(rank), cy: y(at(name)), r: radius, 'data-head': name });
    dot.addEventListener('click', () => choose(state, [l, h], false));
    return dot;
  });
  const ends = [[1, 'start', '1 steadiest'], [order.length, 'end', `${order.length} most changeable`]];
  const labels = ends.map(([rank, anchor, text]) => svg('text', { class: 'tick', x: x(rank), y: RANK_HEIGHT - 8, 'text-anchor': anchor, text }));
  frame.replaceChildren(...ticks, ...dots, ...labels, svg('circle', { class: 'now', r: radius + 4, cx: -20, cy: -20 }));
  markRank(state);
}

function markRank(state) {
  const now = document.querySelector('#rank .now');
  const dot = document.querySelector(`#rank [data-head="${key(...state.chosen)}"]`);
  if (now) set(now, dot ? { cx: dot.getAttribute('cx'), cy: dot.getAttribute('cy') } : { cx: -20, cy: -20 });
}
