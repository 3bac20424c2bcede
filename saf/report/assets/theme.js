// The choice between the light and the dark page; figures that hold colours of their own are painted again.
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

theme();
