"""How a report looks: on a wide screen, on a telephone, in the dark and on paper.

Colours have at least 4.5 : 1 against what they stand on. Pictures are drawn on white and keep it
in the dark. Whatever is wider than the page scrolls inside its own box.
"""

STYLE = """
:root { --ink: #1b2330; --soft: #4d596a; --paper: #ffffff; --tint: #f3f5f8; --line: #c9d0da;
  --link: #0b5394; --warn-ink: #6b3d00; --warn-paper: #fff4e0; --warn-line: #c77700; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #b3bcc8; --paper: #14181f; --tint: #1e242e; --line: #3d4755;
    --link: #8ec5ff; --warn-ink: #ffd9a0; --warn-paper: #33260f; --warn-line: #d98e1f; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 82rem; padding: 1rem 1.25rem 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0.5rem 0 0.25rem; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 2.75rem 0 0.75rem; padding-top: 0.75rem;
  border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.5rem; }
p, ul { max-width: 46rem; margin: 0.6rem 0; }
ul { padding-left: 1.4rem; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; top: 0.5rem; padding: 0.5rem 1rem; background: var(--paper); }
.subtitle, figcaption, caption { color: var(--soft); }
.subtitle { margin-top: 0; }
nav ol { columns: 3 13rem; max-width: 60rem; padding: 0.75rem 1rem 0.75rem 2.4rem; margin: 1rem 0;
  background: var(--tint); border-radius: 6px; }
nav li { break-inside: avoid; padding: 0.1rem 0; }
.summary p { font-size: 1.08rem; }
.note { border-left: 4px solid var(--line); background: var(--tint); padding: 0.6rem 0.9rem; }
.warning { border-left: 4px solid var(--warn-line); background: var(--warn-paper);
  color: var(--warn-ink); padding: 0.6rem 0.9rem; }
.warning a { color: inherit; }
/* A shadow at the side where more of a wide table waits; the paper scrolls along and hides it. */
.scroll { overflow-x: auto; max-width: 100%; margin: 0.75rem 0;
  background: linear-gradient(to right, var(--paper) 40%, transparent) left / 3rem 100% local,
    linear-gradient(to left, var(--paper) 40%, transparent) right / 3rem 100% local,
    linear-gradient(to right, var(--soft), transparent) left / 1rem 100% scroll,
    linear-gradient(to left, var(--soft), transparent) right / 1rem 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0.25rem 0 0.4rem; }
/* A caption is as wide as its table and would scroll away with it. */
caption span { display: inline-block; position: sticky; left: 0;
  max-width: min(56rem, calc(100vw - 2.5rem)); }
th, td { padding: 0.28rem 0.65rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--line); vertical-align: bottom; }
tbody th { font-weight: 600; }
td { min-width: 3.5rem; }
.number { text-align: right; }
.number, .short { white-space: nowrap; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 0.88rem; }
pre { background: var(--tint); padding: 0.75rem 1rem; border-radius: 6px; line-height: 1.5; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; color: var(--link); padding: 0.25rem 0; }
figure { margin: 1.25rem 0 2rem; min-width: 0; }
.beside { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 36rem), 1fr)); }
figcaption { font-size: 0.92rem; max-width: 56rem; }
.picture { background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  padding: 0.4rem; width: fit-content; }
.picture img, .picture svg { display: block; max-width: 100%; height: auto; }
.picture img { width: 64rem; }
@media (max-width: 700px) {
  body { padding: 0.75rem 0.9rem 3rem; }
  h1 { font-size: 1.5rem; }
  .picture { padding: 0.1rem; }
  /* Three maps side by side: smaller than this they say nothing, so they scroll in their box. */
  .picture img { width: 44rem; max-width: none; }
}
@media print {
  :root { --ink: #000; --soft: #222; --paper: #fff; --tint: #fff; --line: #888; --link: #000;
    --warn-ink: #000; --warn-paper: #fff; --warn-line: #000; }
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .skip { display: none; }
  nav ol { border: 1px solid #888; }
  h2, h3, caption, summary, section > p { break-after: avoid; }
  figure, tr, p, .whole { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  th, td { padding: 0.15rem 0.4rem; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #888; }
  .picture { border: 0; padding: 0; }
  .beside { grid-template-columns: 1fr 1fr; }
  caption span { position: static; max-width: none; }
  .picture img, .picture svg { max-width: 100%; max-height: 215mm; width: auto; }
  details pre { columns: 3; font-size: 7pt; line-height: 1.3; }
  details::details-content { content-visibility: visible; block-size: auto; }
  figure details { display: none; }
  a { text-decoration: none; }
  a[href^="http"]::after { content: " (" attr(href) ")"; }
}
"""
