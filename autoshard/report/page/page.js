"use strict";
// The theme: what the system says, until the button is pressed; a page that loads itself again keeps what was chosen.
const root = document.documentElement, kept = { theme: "" };
try { kept.theme = sessionStorage.theme || ""; } catch { /* not for this page */ }
if (kept.theme) root.classList.add(kept.theme);
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.classList.contains("dark") ||
    (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
  root.classList.toggle("dark", !dark);
  root.classList.toggle("light", dark);
  try { sessionStorage.theme = dark ? "light" : "dark"; } catch { /* not for this page */ }
});

// One tip for everything that has data-tip, and for what runs or lies under the pointer in a drawing.
const lively = [];
const tip = document.getElementById("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 20 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
}
document.addEventListener("pointermove", (event) => {
  const one = event.target.closest("[data-tip]");
  const text = one ? one.dataset.tip : lively.reduce((words, part) => words || part(event), "");
  showTip(text, event.clientX, event.clientY);
});
document.addEventListener("focusin", (event) => {
  const one = event.target.closest("[data-tip]"), box = event.target.getBoundingClientRect();
  showTip(one ? one.dataset.tip : "", box.left, box.bottom);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") showTip("", 0, 0); });

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return (value * 1e6).toFixed(1) + " us";
  if (size < 1) return (value * 1e3).toFixed(1) + " ms";
  return size < 600 ? value.toFixed(2) + " s" : (value / 60).toFixed(1) + " min";
}

// What can be moved and pointed at below an element; a page may bring in more than one such part.
function enliven(root) {
  const views = { cut: { start: 0, share: 1 }, whole: { start: 0, share: 1 } };
  // Timelines: the view box is what is seen of the step; timelines that are cut, and those that are not, move together.
  const timelines = [...root.querySelectorAll(".timeline")].map((whole) => {
    const stage = whole.querySelector(".stage"), svg = stage.querySelector("svg");
    const units = +whole.dataset.units, times = new Map(whole.dataset.seconds.split(";").map((one) => one.split("=")));
    const [from, until, gap] = (whole.dataset.cut || "Infinity Infinity 0").split(" ").map(Number);
    return {
      whole, stage, svg, units, times, from, until, gap, end: +whole.dataset.end, ticks: stage.querySelector(".ticks"),
      hatched: [...stage.querySelectorAll(".hatched")], view: whole.dataset.cut ? views.cut : views.whole,
    };
  });
  // From places on an axis to moments of the step, and back: what is not drawn takes the width of its gap alone.
  function moment(one, place) {
    if (place <= one.from) return place;
    return place >= one.from + one.gap ? place - one.gap - one.from + one.until : one.until;
  }
  function placeOf(one, time) { return time <= one.from ? time : time - one.until + one.from + one.gap; }
  function draw() {
    for (const view of Object.values(views)) {
      view.share = Math.min(1, Math.max(1e-4, view.share));
      view.start = Math.min(1 - view.share, Math.max(0, view.start));
    }
    for (const one of timelines) {
      const { view, from, until } = one, height = one.svg.viewBox.baseVal.height;
      one.svg.setAttribute("viewBox", `${view.start * one.units} 0 ${view.share * one.units} ${height}`);
      for (const part of one.hatched) {
        part.style.left = 100 * (part.dataset.from - view.start) / view.share + "%";
        part.style.width = 100 * (part.dataset.until - part.dataset.from) / view.share + "%";
      }
      const shown = view.share * one.end, rough = shown / Math.max(2, one.stage.clientWidth / 110);
      const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
      const ticks = [], last = moment(one, (view.start + view.share) * one.end);
      for (let at = Math.ceil(moment(one, view.start * one.end) / step) * step; at <= last; at += step) {
        if (at > from && at < until) at = Math.ceil(until / step) * step;
        if (at > last) break;
        const tick = document.createElement("span");
        tick.style.left = 100 * (placeOf(one, at) / one.end - view.start) / view.share + "%";
        tick.textContent = seconds(at);
        ticks.push(tick);
      }
      one.ticks.replaceChildren(...ticks);
      if (ticks.length && ticks.at(-1).offsetLeft + ticks.at(-1).offsetWidth > one.stage.clientWidth) ticks.at(-1).remove();
      const hidden = ticks.findIndex((tick, n) => n && tick.offsetLeft < ticks[n - 1].offsetLeft + ticks[n - 1].offsetWidth);
      if (hidden > 0) ticks[hidden].remove();
    }
  }
  function zoom(view, factor, middle) {
    const at = view.start + middle * view.share;
    view.share *= factor;
    view.start = at - middle * Math.min(1, view.share);
    draw();
  }
  const moves = {
    in: (view) => zoom(view, 0.5, 0.5), out: (view) => zoom(view, 2, 0.5),
    all: (view) => { view.start = 0; view.share = 1; draw(); },
    left: (view) => { view.start -= view.share / 4; draw(); }, right: (view) => { view.start += view.share / 4; draw(); },
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", Home: "all", ArrowLeft: "left", ArrowRight: "right" };
  for (const { whole, stage, view } of timelines) {
    for (const button of whole.parentNode.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => moves[button.dataset.zoom](view));
    }
    stage.addEventListener("keydown", (event) => {
      if (keys[event.key]) { moves[keys[event.key]](view); event.preventDefault(); }
    });
    stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      const box = stage.getBoundingClientRect();
      zoom(view, (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
    }, { passive: false });
    stage.addEventListener("dblclick", (event) => {
      const box = stage.getBoundingClientRect();
      zoom(view, 0.4, (event.clientX - box.left) / box.width);
    });
    stage.addEventListener("pointerdown", (down) => {
      if (down.button) return;
      const start = view.start, width = stage.getBoundingClientRect().width;
      const move = (event) => { view.start = start - view.share * (event.clientX - down.clientX) / width; draw(); };
      stage.setPointerCapture(down.pointerId);
      stage.addEventListener("pointermove", move);
      const end = () => stage.removeEventListener("pointermove", move);
      stage.addEventListener("pointerup", end, { once: true });
      stage.addEventListener("pointercancel", end, { once: true });
    });
  }
  root.addEventListener("toggle", draw, true);
  addEventListener("resize", draw);
  draw();

  // What runs under the pointer: the pieces of a path in order are the micro-batches that it names.
  const words = { F: "forward", B: "backward", I: "input gradients", W: "weight gradients" };
  function pieces(path) {
    if (!path.pieces) {
      let at = 0;
      path.pieces = [...path.getAttribute("d").matchAll(/[Mm](-?\d+) \d+h(\d+)/g)].map(([, move, length]) => {
        const start = at + +move;
        at = start + +length;
        return [start, at];
      });
    }
    return path.pieces;
  }
  function action(event) {
    const path = event.target.closest(".stage path[data-stage]");
    if (!path) return "";
    const one = timelines.find(({ svg }) => svg.contains(path));
    if (!one) return "";
    const box = one.svg.getBoundingClientRect();
    const at = (one.view.start + one.view.share * (event.clientX - box.left) / box.width) * one.units;
    const number = pieces(path).findIndex(([start, end]) => start <= at && at <= end);
    if (number < 0) return "";
    const listed = path.dataset.batches.split(" ").map(Number), kind = path.classList[0], stage = path.dataset.stage;
    const batch = listed.length > 1 ? listed[number] : listed[0] + number;
    const time = one.times.get(kind + stage), rank = path.parentNode.dataset.rank;
    return `${kind}${stage}.${batch}: ${words[kind]} of micro-batch ${batch}, stage ${stage}, rank ${rank}; ` +
      `${seconds(+time)} from ${seconds(moment(one, pieces(path)[number][0] / one.units * one.end))}`;
  }

  // The mesh: ranks of the same groups as the one pointed at, and colours by an axis.
  const nodes = root.querySelector(".nodes");
  const cells = nodes ? [...nodes.querySelectorAll("i")].map((cell) => ({ cell, at: cell.dataset.at.split(".").map(Number) })) : [];
  const axes = nodes && nodes.dataset.axes ? nodes.dataset.axes.split(" ") : [];
  let chosen = Math.max(0, [...root.querySelectorAll("[name=axis]")].findIndex((one) => one.checked));
  for (const choice of root.querySelectorAll("[name=axis]")) choice.addEventListener("change", () => {
    chosen = +choice.value;
    const count = 1 + Math.max(...cells.map(({ at }) => at[chosen]));
    for (const { cell, at } of cells) {
      cell.style.setProperty("--turn", at[chosen] / count);
      cell.style.setProperty("--light", at[chosen] % 2 ? "70%" : "87%");
      cell.textContent = at[chosen];
    }
  });
  function rank(event) {
    const pointed = cells.find(({ cell }) => cell === event.target);
    for (const box of root.querySelectorAll(".cells")) box.classList.toggle("pointed", !!pointed);
    if (!pointed || !axes.length) return "";
    for (const { cell, at } of cells) {
      cell.classList.toggle("same", at.every((place, axis) => axis === chosen || place === pointed.at[axis]));
    }
    const places = axes.map((axis, number) => `${axis} ${pointed.at[number]}`).join(", ");
    return `rank ${pointed.cell.dataset.rank}: ${places}; outlined: its ${axes[chosen]} group`;
  }
  const under = (event) => root.contains(event.target) ? action(event) || rank(event) : "";
  lively.push(under);
  return () => { lively.splice(lively.indexOf(under), 1); removeEventListener("resize", draw); root.removeEventListener("toggle", draw, true); };
}
enliven(document);
