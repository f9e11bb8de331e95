"use strict";
// The question stands in the address, after its #, which a browser sends nowhere: a page that is loaded again asks it again.
const content = document.getElementById("content"), typing_ms = 250;
const panes = [...document.querySelectorAll(".pane")].map((whole) => ({
  whole, name: whole.id, form: whole.querySelector("form"), command: whole.querySelector(".command"),
  status: whole.querySelector(".status"), result: whole.querySelector(".result"), files: [...whole.querySelectorAll(".file")],
  copy: whole.querySelector(".copy"), asking: null, timer: 0, still: () => {}, answered: false,
}));
const toggle = document.getElementById("compare"), between = document.getElementById("difference");
const controls = (pane) => [...pane.form.elements].filter((one) => one.name);
const question = (pane) => Object.fromEntries(controls(pane).map((one) => [one.name, one.value]));

function fill(pane, values) {
  for (const one of controls(pane)) {
    const value = values[one.name] ?? one.dataset.first;
    if (one.tagName === "SELECT" && ![...one.options].some((option) => option.value === value)) one.add(new Option(value, value));
    one.value = value;
  }
}
function remember() {
  const words = new URLSearchParams();
  for (const pane of panes) {
    if (pane.whole.hidden) continue;
    for (const one of controls(pane)) if (one.value !== one.dataset.first || pane.name === "b") words.set(`${pane.name}.${one.name}`, one.value);
  }
  history.replaceState(null, "", `#${words}`);
}
function recall() {
  const words = new URLSearchParams(location.hash.slice(1)), stated = { a: {}, b: {} };
  for (const [key, value] of words) {
    const [pane, name] = key.split(".");
    if (stated[pane]) stated[pane][name] = value;
  }
  for (const pane of panes) fill(pane, stated[pane.name]);
  two(Object.keys(stated.b).length > 0);
}

// Two ids of one page may not be the same, so those of an answer get the name of its pane.
function show(place, html, name) {
  const box = document.createElement("template");
  box.innerHTML = html;
  for (const one of box.content.querySelectorAll("[id]")) one.id = `${name}-${one.id}`;
  for (const one of box.content.querySelectorAll("[aria-labelledby]")) {
    one.setAttribute("aria-labelledby", `${name}-${one.getAttribute("aria-labelledby")}`);
  }
  const opened = [...place.querySelectorAll("details")].map((one) => one.open);
  box.content.querySelectorAll("details").forEach((one, number) => { one.open = opened[number] ?? one.open; });
  const top = scrollY;
  place.replaceChildren(box.content);
  scrollTo({ top, behavior: "instant" });
}
function say(pane, text, refused) {
  pane.status.textContent = text;
  pane.status.classList.toggle("refused", !!refused);
}
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}
const takes = { // what becomes of each kind of event
  question(pane, event) {
    const words = [...content.dataset.line.split(" "), ...event.words.map(quoted)].map((word) => {
      const part = document.createElement("span"); // a line breaks between words, not at their hyphens
      part.textContent = word;
      return [part, " "];
    });
    pane.command.replaceChildren(...words.flat().slice(0, -1));
  },
  progress(pane, event) {
    say(pane, pane.early ? `${event.text}; shown is the best plan after ${pane.early}` : `${pane.reason}${event.text}`, pane.reason);
  },
  refused(pane, event) {
    if (!event.final && pane.early) return; // a half that stopped later has a plan
    const lines = event.lines.join("\n");
    pane.reason = `${lines}\n`; // stays while the search goes on
    say(pane, lines, true);
  },
  replaced() {},
  answer(pane, event) {
    if (!event.final && event.after_s < pane.after_s) return; // drawn sooner than that of an earlier moment
    pane.after_s = event.after_s;
    pane.still();
    show(pane.result, event.html, pane.name);
    pane.still = enliven(pane.result);
    pane.reason = "";
    pane.early = event.final ? "" : `${event.after_s.toFixed(1)} s`;
    pane.answered = true;
    for (const file of pane.files) file.hidden = false;
    const time = ((performance.now() - pane.start) / 1000).toFixed(1);
    say(pane, event.final ? `answered in ${time} s` : `searching; shown is the best plan after ${pane.early}`);
    pane.whole.toggleAttribute("data-early", !event.final);
    differ();
  },
};
async function ask(pane) {
  pane.asking?.abort();
  const mine = pane.asking = new AbortController();
  Object.assign(pane, { early: "", reason: "", after_s: 0, answered: false, start: performance.now() });
  for (const file of pane.files) file.hidden = true;
  pane.whole.setAttribute("aria-busy", "true");
  between.replaceChildren();
  say(pane, "searching");
  try {
    const response = await fetch(`${pane.name}/answer`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question(pane)), signal: mine.signal,
    });
    if (!response.ok) throw new Error(`the server refuses: ${(await response.text()).trim()}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const event = JSON.parse(line);
        if (mine.signal.aborted) return;
        takes[event.kind](pane, event);
        if (event.kind === "answer") pane.whole.removeAttribute("aria-busy");
      }
    }
  } catch (error) {
    if (mine.signal.aborted) return;
    say(pane, error instanceof TypeError ? "the server does not answer: is autoshard explore still running?" : error.message, true);
  }
  if (pane.asking === mine) pane.whole.removeAttribute("aria-busy");
}
let differences = 0;
async function differ() {
  if (!panes.every((pane) => pane.answered && !pane.whole.hidden)) return;
  const number = ++differences;
  between.toggleAttribute("data-stale", true);
  try {
    const event = await (await fetch("difference", { method: "POST" })).json();
    if (number !== differences || event.kind !== "difference" || !panes.every((pane) => pane.answered)) return;
    show(between, event.html, "both");
    between.removeAttribute("data-stale");
  } catch { /* the server has ended, as the next question says */ }
}
function changed(pane, wait_ms) {
  clearTimeout(pane.timer);
  pane.timer = setTimeout(() => { remember(); ask(pane); }, wait_ms);
}
function two(wanted) {
  panes[1].whole.hidden = !wanted;
  document.body.classList.toggle("two", wanted);
  toggle.setAttribute("aria-pressed", wanted);
  if (!wanted) { panes[1].asking?.abort(); between.replaceChildren(); }
}
toggle.addEventListener("click", () => {
  const opens = panes[1].whole.hidden;
  if (opens) fill(panes[1], question(panes[0]));
  two(opens);
  remember();
  dispatchEvent(new Event("resize"));
  if (opens) { ask(panes[1]); controls(panes[1])[0].focus(); }
});
for (const pane of panes) {
  for (const one of controls(pane)) one.dataset.first = one.value;
  pane.form.addEventListener("input", (event) => changed(pane, event.target.tagName === "SELECT" ? 0 : typing_ms));
  pane.form.addEventListener("submit", (event) => { event.preventDefault(); changed(pane, 0); });
  pane.copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(pane.command.textContent);
      pane.copy.textContent = "copied";
    } catch { // the browser does not let us: what is selected can be copied by a key
      getSelection().selectAllChildren(pane.command);
      pane.copy.textContent = "selected";
    }
    setTimeout(() => { pane.copy.textContent = "copy"; }, 1500);
  });
}
addEventListener("hashchange", () => { recall(); for (const pane of panes) if (!pane.whole.hidden) ask(pane); });
recall();
for (const pane of panes) if (!pane.whole.hidden) ask(pane);
