"""The style sheet of a page: the browser's own fonts, colors that suit its light or dark mode."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --raised: #f6f7f9; --ink: #1c2128; --faint: #5b6570; --line: #d8dde3;
  --first: #1f6fb2; --second: #c2570c; --third: #8250df;
  --good: #1a7f37; --bad: #a4590b; --mark: #ffe3a3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181d; --raised: #1d232a; --ink: #e4e8ec; --faint: #9aa5b1; --line: #363e48;
    --first: #6cb2ee; --second: #f0a060; --third: #c297ff;
    --good: #57c27a; --bad: #e5a050; --mark: #5d4711;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2.4rem 0 .7rem; font-size: 1.2rem; }
h3 { margin: 1.4rem 0 .4rem; font-size: 1rem; overflow-wrap: anywhere; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.faint, figcaption, .note { color: var(--faint); font-size: .9rem; }
.state { font-weight: 600; }
.finished { color: var(--good); } .interrupted, .warning { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .93rem; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
th.number { white-space: normal; vertical-align: bottom; }
td:first-child { min-width: 7rem; }
td.number { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.chosen td { font-weight: 600; }
table.fields { table-layout: fixed; width: 100%; } table.fields td { overflow-wrap: anywhere; }
code { font: .88rem/1.5 ui-monospace, monospace; }
pre { margin: .2rem 0 .9rem; padding: .55rem .8rem; border-radius: 6px; background: var(--raised);
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; }
pre span { display: inline-block; max-width: 100%; white-space: pre-wrap; }
dl.commands dt { margin-top: .6rem; } dl.commands dd { margin: 0; }
details { margin: .6rem 0; } summary { cursor: pointer; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
figure { margin: 0; padding: .7rem .8rem; border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; }
figure b { font-size: .93rem; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; border-radius: 4px;
  background: #fff; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg .thin { stroke-width: 1; opacity: .6; }
svg .level { stroke: var(--faint); stroke-dasharray: 5 4; }
svg .first { stroke: var(--first); } svg .second { stroke: var(--second); }
svg .third { stroke: var(--third); }
svg circle { stroke: none; } svg circle.first { fill: var(--first); }
svg circle.second { fill: var(--second); } svg circle.third { fill: var(--third); }
svg .interval { stroke: var(--first); stroke-width: 6; opacity: .3; }
svg.key { display: inline-block; width: 1.7em; height: .7em; margin: 0 .3em 0 0; }
svg.seeds { width: 9rem; }
.legend span { margin-right: 1.1em; white-space: nowrap; }
.example { line-height: 2.3; padding: .8rem 1rem .4rem; border: 1px solid var(--line);
  border-radius: 8px; }
mark { padding: .05em .2em; border-radius: 3px; background: var(--mark); color: inherit; }
rt { color: var(--faint); font-size: .68em; }
.suspect { text-decoration: underline solid var(--second) 2.5px; text-underline-offset: .25em; }
.pair { margin: .8rem 0; padding-left: .8rem; border-left: 3px solid var(--line); }
.pair p { margin: .15rem 0; } .pair b { color: var(--faint); font-size: .85rem; }
@media print { pre { user-select: auto; } figure { break-inside: avoid; } }
"""
