//! What every page looks like, and the few lines of script that sort its tables. Constants only.

use super::super::scene::Ink;
use super::super::theme;

/// How every page begins. It forbids the browser to fetch anything.
pub const HEAD: &str = include_str!("../../../assets/page-head.html");

/// The style of a page.
pub const CSS: &str = "\
:root{--bg:#ffffff;--card:#fbfaf7;--ink:#22262c;--muted:#5b626c;--line:#d8d5cd;--head:#f3f1ec;--accent:#0072b2;--warn:#8a4b00;
--warn-bg:#fdf0dc}
@media (prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f25;--ink:#e4e6ea;--muted:#a2a9b4;--line:#363b44;
--head:#23272e;--accent:#6cb8ee;--warn:#ffc879;--warn-bg:#3a2b12}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
header,main,footer{max-width:1120px;margin:0 auto;padding:0 16px}
p,dl{max-width:860px}
header{padding-top:28px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:36px 0 10px;padding-top:12px;border-top:1px solid var(--line)}
header p{margin:0 0 8px;color:var(--muted);overflow-wrap:anywhere}
p.emulated{color:var(--warn);background:var(--warn-bg);padding:8px 12px;border-radius:6px}
span.emulated{color:var(--warn);background:var(--warn-bg);font-size:.72rem;font-weight:600;padding:1px 7px;border-radius:9px;
margin-left:6px;white-space:nowrap}
p.verdict{font-size:1.12rem;font-weight:600;border-left:4px solid var(--accent);padding:4px 0 4px 14px;margin:0 0 14px}
p.note{color:var(--muted);font-size:.85rem;margin:4px 0 20px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0 0 16px;font-size:.92rem}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
div.table{overflow-x:auto;margin:0 0 6px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:10px 0 6px;font-size:.95rem}
th,td{padding:4px 7px;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
td:first-child{max-width:22em;overflow:hidden;text-overflow:ellipsis}
th{background:var(--head);padding:0;vertical-align:bottom;white-space:normal}
th button{all:unset;cursor:pointer;display:block;width:100%;padding:5px 7px;font-weight:600;box-sizing:border-box}
th button:focus-visible{outline:2px solid var(--accent);outline-offset:-2px}
th.n,td.n,th.n button{text-align:right}
th[aria-sort=ascending] button::after{content:' \\25B2';font-size:.7em}
th[aria-sort=descending] button::after{content:' \\25BC';font-size:.7em}
figure{margin:0 0 20px;overflow-x:auto}
figure svg{display:block;width:100%;max-width:860px;height:auto;margin:0 auto}
footer{color:var(--muted);font-size:.85rem;padding-top:30px;padding-bottom:40px}
@media (max-width:600px){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}figure svg{min-width:560px}h1{font-size:1.4rem}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--muted:#444;--line:#bbb;--head:#eee;--warn:#000;--warn-bg:#eee}
body{font-size:10pt}header,main,footer{max-width:none;padding:0}figure,tr,p.verdict{break-inside:avoid}h2{break-after:avoid}
div.table,figure{overflow:visible}th button::after{content:none!important}}
";

/// Sorts a table by the column whose heading was pressed; a second press turns it round.
pub const SCRIPT: &str = "\
'use strict';
for (const button of document.querySelectorAll('th button')) {
  button.addEventListener('click', () => {
    const heading = button.parentElement, row = heading.parentElement, body = row.closest('table').tBodies[0];
    const column = Array.prototype.indexOf.call(row.children, heading);
    const numbers = heading.classList.contains('n');
    const before = heading.getAttribute('aria-sort');
    const up = before ? before === 'descending' : !numbers;
    for (const other of row.children) other.removeAttribute('aria-sort');
    heading.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const key = line => {
      const cell = line.children[column];
      return numbers ? Number(cell.dataset.v ?? '-Infinity') : cell.textContent;
    };
    const order = (a, b) => (numbers ? a - b : a.localeCompare(b, undefined, {numeric: true}));
    const lines = Array.from(body.rows).sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)));
    body.append(...lines);
  });
}
";

/// What the colours of a figure's card, text and lines become on a dark page. The colours of drives stay.
const DARK: [(Ink, &str); 7] = [
    (theme::CARD, "#1c1f25"),
    (theme::EDGE, "#363b44"),
    (theme::INK, "#e4e6ea"),
    (theme::MUTED, "#a2a9b4"),
    (theme::GRID, "#2c313a"),
    (theme::AXIS, "#767e8a"),
    (theme::TRACK, "#2a2e36"),
];

/// Rules that turn the figures dark with the page, on a screen only: paper stays light.
pub fn figures_in_the_dark() -> String {
    let mut css = String::from("@media screen and (prefers-color-scheme:dark){");
    for (ink, dark) in DARK {
        let (r, g, b) = ink.rgb;
        let light = format!("#{r:02X}{g:02X}{b:02X}");
        css.push_str(&format!("svg [fill=\"{light}\"]{{fill:{dark}}}svg [stroke=\"{light}\"]{{stroke:{dark}}}\n"));
    }
    css.push_str("}\n");
    css
}
