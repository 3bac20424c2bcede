// Line charts: drawn at the width they have, readable with the pointer and with the arrow keys.
function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) if (v !== null && Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  return low <= high ? [low, high] : [0, 1];
}

let clips = 0;

// series: {name, color, x, y, faint, points, low, high}; markers: {x, label, title}; options: height, xKind, yKind, xLabel, yLabel,
// xDomain, minSpan, zero, focus (faint series do not widen the axis), label, format.
function lineChart(host, series, options) {
  const o = { height: 260, xKind: 'linear', yKind: 'linear', markers: [], format: (v) => short(v, 4), xName: '', ...options };
  const readout = el('output', { class: 'readout', 'aria-live': 'polite' });
  const frame = svg('svg', { class: 'chart', tabindex: 0, role: 'group', 'aria-label': `${o.label}. Left and right arrow keys read values.` });
  const caption = el('p', { class: 'axis-title', text: o.yLabel });
  host.replaceChildren(caption, readout, frame);
  const clip = `clip-${(clips += 1)}`;
  let at = null;
  let geometry = null;

  function draw() {
    const width = Math.max(220, host.clientWidth || 600);
    const margin = { left: o.left || 50, right: 12, top: 8, bottom: 34 };
    geometry = layout(series, o, width, margin);
    const { x, y } = geometry;
    set(frame, { viewBox: `0 0 ${width} ${o.height}`, width, height: o.height });
    frame.replaceChildren(
      ...axes(geometry, o, width, margin),
      ...o.markers.filter((m) => inside(m.x, geometry.xDomain)).map((m) => marker(m, x(m.x), o, width, margin)),
      svg('clipPath', { id: clip }, [svg('rect', { x: margin.left, y: margin.top, width: width - margin.left, height: o.height - margin.top - margin.bottom })]),
      svg('g', { 'clip-path': `url(#${clip})` }, series.flatMap((s) => drawn(s, geometry, o))),
      svg('line', { class: 'cross', y1: margin.top, y2: o.height - margin.bottom, x1: -9, x2: -9 }),
      ...series.filter((s) => !s.faint).map((s) => svg('circle', { class: 'hit', r: 4, style: `fill:${s.color}`, cx: -9, cy: -9 })),
    );
    if (at !== null) point(at);
  }

  function point(position) {
    const { x, y, steps } = geometry;
    at = Math.min(Math.max(position, 0), steps.length - 1);
    const value = steps[at];
    set(frame.querySelector('.cross'), { x1: x(value), x2: x(value) });
    const hits = frame.querySelectorAll('.hit');
    const words = [`${o.xName} ${whole(value)}`];
    series.filter((s) => !s.faint).forEach((s, i) => {
      const nearest = nearestIndex(s.x, value);
      const shown = s.y[nearest];
      const visible = shown !== null && Math.abs(s.x[nearest] - value) <= geometry.reach;
      set(hits[i], { cx: visible ? x(s.x[nearest]) : -9, cy: visible ? y(shown) : -9 });
      if (visible) words.push([s, `${s.name ? `${s.name} ` : ''}${o.format(shown)}`]);
    });
    readout.replaceChildren(...words.map((w) => (typeof w === 'string' ? el('span', { text: w })
      : el('span', { style: `--c:${w[0].color}`, class: 'key', text: w[1] }))));
  }

  function rest() {
    at = null;
    if (frame.querySelector('.cross')) {
      set(frame.querySelector('.cross'), { x1: -9, x2: -9 });
      frame.querySelectorAll('.hit').forEach((hit) => set(hit, { cx: -9, cy: -9 }));
    }
    const named = series.filter((s) => !s.faint && s.name);
    readout.replaceChildren(...named.map((s) => el('span', { style: `--c:${s.color}`, class: 'key', text: s.name })));
  }

  frame.addEventListener('pointermove', (event) => {
    const box = frame.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * geometry.width;
    let best = 0;
    geometry.steps.forEach((v, i) => { if (Math.abs(geometry.x(v) - pixel) < Math.abs(geometry.x(geometry.steps[best]) - pixel)) best = i; });
    point(best);
  });
  frame.addEventListener('pointerleave', rest);
  frame.addEventListener('blur', rest);
  frame.addEventListener('keydown', (event) => {
    const last = geometry.steps.length - 1;
    const stride = event.shiftKey ? 10 : 1;
    const next = { ArrowLeft: (at ?? last + 1) - stride, ArrowRight: (at ?? -1) + stride, Home: 0, End: last }[event.key];
    if (next !== undefined) { event.preventDefault(); point(next); }
    if (event.key === 'Escape') rest();
  });
  new ResizeObserver(draw).observe(host);
  draw();
  rest();
}

const inside = (v, [low, high]) => v >= low && v <= high;

function layout(series, o, width, margin) {
  const xDomain = o.xDomain || extent(series.flatMap((s) => extent(s.x)));
  const shown = series.filter((s) => !(o.focus && s.faint)).flatMap((s) => s.y.filter((_, i) => inside(s.x[i], xDomain)).concat(s.low || [], s.high || []));
  let yDomain = extent(o.yKind === 'log' ? shown.filter((v) => v > 0) : shown);
  if (o.zero) yDomain = [Math.min(0, yDomain[0]), Math.max(0, yDomain[1])];
  const missing = (o.minSpan || 0) - (yDomain[1] - yDomain[0]);
  if (missing > 0) yDomain = [yDomain[0] - missing / 2, yDomain[1] + missing / 2];
  if (yDomain[0] === yDomain[1]) yDomain = [yDomain[0] - 0.5, yDomain[1] + 0.5];
  const pad = (yDomain[1] - yDomain[0]) * (o.focus ? 0.3 : 0.04);
  if (o.yKind === 'linear') yDomain = [yDomain[0] - pad, yDomain[1] + pad];
  const longest = series.filter((s) => !s.faint).reduce((a, s) => (s.x.length > a.length ? s.x : a), []);
  const steps = longest.filter((v) => inside(v, xDomain));
  const reach = o.xKind === 'linear' ? ((xDomain[1] - xDomain[0]) / Math.max(1, steps.length)) * 2 : Infinity;
  return {
    width, xDomain, yDomain, steps, reach,
    x: scale(o.xKind, xDomain, [margin.left, width - margin.right]),
    y: scale(o.yKind, yDomain, [o.height - margin.bottom, margin.top]),
  };
}

function axes({ x, y, yDomain }, o, width, margin) {
  const bottom = o.height - margin.bottom;
  const parts = [];
  for (const tick of y.ticks(o.height < 200 ? 4 : 5)) {
    parts.push(svg('line', { class: tick === 0 && o.zero ? 'zero' : 'grid', x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick) }));
    parts.push(svg('text', { class: 'tick', x: margin.left - 6, y: y(tick) + 4, 'text-anchor': 'end', text: short(tick) }));
  }
  for (const tick of x.ticks(width < 420 ? 4 : 7)) {
    parts.push(svg('line', { class: 'tickmark', x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }));
    parts.push(svg('text', { class: 'tick', x: x(tick), y: bottom + 16, 'text-anchor': 'middle', text: whole(tick) }));
  }
  parts.push(svg('line', { class: 'base', x1: margin.left, x2: width - margin.right, y1: bottom, y2: bottom }));
  parts.push(svg('text', { class: 'x-title', x: width - margin.right, y: o.height - 3, 'text-anchor': 'end', text: o.xLabel }));
  return parts;
}

function marker({ label, title }, at, o, width, margin) {
  const right = at > width - 150;
  return svg('g', { class: 'event' }, [
    ...(title ? [svg('title', { text: title })] : []),
    svg('line', { x1: at, x2: at, y1: margin.top, y2: o.height - margin.bottom }),
    svg('text', { x: at + (right ? -6 : 6), y: margin.top + 12, 'text-anchor': right ? 'end' : 'start', text: label }),
  ]);
}

function drawn(s, { x, y, xDomain, yDomain }, o) {
  const ok = (i) => inside(s.x[i], xDomain) && s.y[i] !== null && (o.yKind !== 'log' || s.y[i] > 0);
  const indices = s.x.map((_, i) => i).filter(ok);
  if (s.points) {
    return indices.map((i) => svg('circle', { class: 'point', cx: x(s.x[i]), cy: y(s.y[i]), r: 3.5, style: `stroke:${s.color}` }));
  }
  const parts = [];
  if (s.low) {
    const upper = indices.map((i) => `${x(s.x[i]).toFixed(1)},${y(s.high[i]).toFixed(1)}`);
    const lower = indices.map((i) => `${x(s.x[i]).toFixed(1)},${y(s.low[i]).toFixed(1)}`).reverse();
    parts.push(svg('polygon', { class: 'band', points: [...upper, ...lower].join(' '), style: `fill:${s.color}` }));
  }
  const path = indices.map((i) => `${x(s.x[i]).toFixed(1)},${y(s.y[i]).toFixed(1)}`).join(' ');
  parts.push(svg('polyline', { class: s.faint ? 'line faint' : 'line', points: path, style: `stroke:${s.color}` }));
  return parts;
}

function nearestIndex(values, wanted) {
  let best = 0;
  values.forEach((v, i) => { if (Math.abs(v - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}
