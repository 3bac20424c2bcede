// Elements, numbers, scales and colours shared by every figure.
const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';

function set(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  for (const child of children || []) if (child) node.append(child);
  return node;
}
const el = (tag, attributes, children) => set(document.createElement(tag), attributes, children);
const svg = (tag, attributes, children) => set(document.createElementNS(SVG, tag), attributes, children);

function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  const shown = size >= 1e-3 && size < 1e5 ? Number(value.toPrecision(digits)).toLocaleString('en')
    : value.toExponential(digits - 1).replace(/\.?0+e/, 'e').replace('e+', 'e').replace(/e(-?\d+)/, '×10^$1').replace(/^1×/, '');
  return shown.replace('-', '−').replace(/\^(−|-)?(\d+)/, (_, minus, n) =>
    (minus ? '⁻' : '') + [...n].map((d) => '⁰¹²³⁴⁵⁶⁷⁸⁹'[d]).join(''));
}
const whole = (value) => Math.round(value).toLocaleString('en');

// A scale maps a value to a pixel and says where its ticks stand.
const KINDS = {
  linear: { to: (v) => v },
  log: { to: (v) => Math.log10(v) },
  log1p: { to: (v) => Math.log10(v + 1) },
};

function scale(kind, domain, range) {
  const { to } = KINDS[kind];
  const [a, b] = domain.map(to);
  const map = (v) => range[0] + ((to(v) - a) / (b - a || 1)) * (range[1] - range[0]);
  map.ticks = (count) => (kind === 'linear' ? linearTicks(domain, count) : logTicks(kind, domain, count));
  return map;
}

function linearTicks([low, high], count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Math.abs(v) < step / 1e6 ? 0 : v);
  return ticks;
}

function logTicks(kind, [low, high], count) {
  const first = kind === 'log1p' ? 0 : Math.floor(Math.log10(low));
  const powers = [];
  for (let p = first; 10 ** p <= high * 1.001; p += 1) powers.push(10 ** p);
  const inside = powers.filter((v) => v >= low * 0.999);
  if (kind === 'log1p') return [0, ...thin(inside, count)];
  if (inside.length >= 3) return thin(inside, count);
  for (const parts of [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 8]]) {
    const fine = powers.flatMap((v) => parts.map((m) => m * v)).filter((v) => v >= low && v <= high);
    if (fine.length >= 3) return thin(fine, count);
  }
  return linearTicks([low, high], count);
}

const thin = (ticks, count) => ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0);

// Colours come from the style sheet, so that a change of theme reaches every figure.
const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ramp = (name) => token(name).split(/\s+/).map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function mix(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (at - i)));
}
const css = (rgb) => `rgb(${rgb.join(',')})`;
const luminance = ([r, g, b]) => (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;

// The colour of an arm, or of what was frozen in it.
const armColor = (arm) => `var(--${arm.colour})`;

// A segmented control made of radio buttons: [{value, label}], the first one chosen unless told.
let choices = 0;
function segmented(label, options, changed, chosen = options[0].value) {
  const name = `choice-${(choices += 1)}`;
  const inputs = options.map(({ value, label: caption }, i) => {
    const input = el('input', { type: 'radio', name, id: `${name}-${i}`, value, onchange: () => changed(value) });
    input.checked = value === chosen;
    return [input, el('label', { for: `${name}-${i}`, text: caption })];
  });
  return el('fieldset', { class: 'segmented' }, [el('legend', { text: label }), ...inputs.flat()]);
}
