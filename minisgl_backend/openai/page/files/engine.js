// Live figures of the engine, from the server's metrics.
import {$} from "./elements.js";

const PLOTS = [["running", "requests running", 0], ["waiting", "waiting", 0], ["kv", "KV pages in use, %", 1],
  ["rate", "tokens/s", 1], ["gap", "ms between tokens", 2],
  ["drafts", "tokens a step with drafts", 2]];  // the last one where the engine speculates
const POINTS = 90, PERIOD_MS = 1000;
const figures = Object.fromEntries(PLOTS.map(([name]) => [name, []]));
let last = null;

// Looks once a second; `looked` is called each time, with whether the server answered. `isAnswering`: whether an answer
// comes at the time, which a server that stops still sends to its end.
export function watchEngine(looked, isAnswering) {
  for (const [name, title] of PLOTS) {
    const figure = document.createElement("figure");
    figure.id = `figure-${name}`;
    figure.innerHTML = `<figcaption><span>${title}</span><b id="value-${name}">-</b></figcaption><canvas id="plot-${name}"></canvas>`;
    $("plots").append(figure);
  }
  $("figure-drafts").insertAdjacentHTML("beforeend", `<small id="accepted"></small>`);
  $("figure-drafts").hidden = true;
  (async function again() {
    looked(await look(isAnswering));
    setTimeout(again, PERIOD_MS);
  })();
}

async function look(isAnswering) {
  let state;
  try {
    const reply = await fetch("metrics");
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const now = samples(await reply.text());
    record(now, performance.now() / 1000);
    state = now.engine_up ? "ready" : "the engine is down";
  } catch (error) {
    state = !(error instanceof TypeError) ? error.message : isAnswering() ? "the server is stopping" : "the server cannot be reached";
    last = null;
    for (const [name] of PLOTS) figures[name].push(null);
  }
  $("state").textContent = $("state").title = state;
  for (const [name, , digits] of PLOTS) plot(name, digits);
  const value = name => $(`value-${name}`).textContent;
  $("strip").textContent = `${value("running")} running · ${value("rate")} tokens/s · KV ${value("kv")}%`;
  return last !== null;
}

function samples(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^minisgl_(\w+)(\{[^}]*\})? (\S+)$/.exec(line);
    if (match) found[match[1] + (match[2] || "")] = Number(match[3]);
  }
  return found;
}

function record(now, time) {
  const pages = state => now[`kv_pages{state="${state}"}`] || 0;
  const grown = name => last ? now[name] - last.now[name] : null;
  const tokens = grown("generated_tokens_total"), gaps = grown("inter_token_seconds_count");
  figures.running.push(now.requests_running || 0);
  figures.waiting.push(now.requests_waiting || 0);
  figures.kv.push(pages("total") ? 100 * pages("leased") / pages("total") : 0);
  figures.rate.push(last ? Math.max(0, tokens / (time - last.time)) : null);
  figures.gap.push(gaps > 0 ? 1000 * grown("inter_token_seconds_sum") / gaps : null);
  recordDrafts(now);
  last = {now, time};
}

// What of the drafts was right: since the last look, and by position since the server has started.
function recordDrafts(now) {
  const positions = [];
  for (let position = 1; now[drafted(position)]; position++) positions.push(position);
  const accepted = figures => positions.reduce((sum, position) => sum + (figures[right(position)] || 0), 0);
  const drafts = last ? now.drafts_total - (last.now.drafts_total || 0) : 0;
  figures.drafts.push(drafts > 0 ? 1 + (accepted(now) - accepted(last.now)) / drafts : null);
  $("figure-drafts").hidden = !positions.length;
  const share = position => Math.round(100 * (now[right(position)] || 0) / now[drafted(position)]);
  $("accepted").textContent = `accepted, by position: ${positions.map(share).join(" / ")} %`;
}

const drafted = position => `draft_tokens_total{position="${position}"}`;
const right = position => `accepted_draft_tokens_total{position="${position}"}`;

function plot(name, digits) {
  const points = figures[name], canvas = $(`plot-${name}`), scale = window.devicePixelRatio || 1;
  if (points.length > POINTS) points.shift();
  const value = points[points.length - 1];
  $(`value-${name}`).textContent = Number.isFinite(value) ? value.toFixed(digits) : "-";
  if (!canvas.clientWidth) return;  // in a drawer that is closed
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const pen = canvas.getContext("2d"), most = Math.max(...points.filter(Number.isFinite), 1e-9) * 1.1;
  pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  pen.lineWidth = 1.5 * scale;
  pen.beginPath();
  let down = false;
  points.forEach((point, index) => {
    if (!Number.isFinite(point)) { down = false; return; }
    const x = index / (POINTS - 1) * canvas.width, y = canvas.height - 2 - point / most * (canvas.height - 4);
    down ? pen.lineTo(x, y) : pen.moveTo(x, y);
    down = true;
  });
  pen.stroke();
}
