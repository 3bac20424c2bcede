// The choice between the light and the dark page, and the page on paper; figures that hold colours are painted again.
let repaint = () => {};

function theme() {
  const button = document.getElementById('theme');
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const dark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : system.matches);
  const tell = () => {
    button.textContent = dark() ? 'Light page' : 'Dark page';
    button.setAttribute('aria-pressed', dark());
    repaint();
  };
  button.hidden = false;
  button.addEventListener('click', () => { root.dataset.theme = dark() ? 'light' : 'dark'; tell(); });
  system.addEventListener('change', tell);
  tell();
}

// On paper the page is light, and everything on it is open.
function paper() {
  const root = document.documentElement;
  let chosen;
  addEventListener('beforeprint', () => {
    chosen = root.dataset.theme;
    root.dataset.theme = 'light';
    document.querySelectorAll('details:not([open])').forEach((part) => { part.open = true; part.dataset.opened = ''; });
    repaint();
  });
  addEventListener('afterprint', () => {
    if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme;
    document.querySelectorAll('details[data-opened]').forEach((part) => { part.open = false; delete part.dataset.opened; });
    repaint();
  });
}

// A table that goes on to the right says so.
function wide() {
  const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => target.classList.toggle('wide', target.scrollWidth > target.clientWidth + 1)));
  document.querySelectorAll('.scroll').forEach((box) => watch.observe(box));
}

document.documentElement.classList.add('scripted');
theme();
paper();
wide();
