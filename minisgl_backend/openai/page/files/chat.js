// The page: chats, what is asked, and what answers. A chat is {id, time, turns}; a turn is {question, answer, thoughts,
// state, note, error} with state "done", "stopped" or "failed", and one that has no answer is never sent again.
import {allChats, deleteAllChats, deleteChat, loadChat, newChat, saveChat, titleOf} from "./chats.js";
import {watchEngine} from "./engine.js";
import {Answer, copy} from "./markdown.js";
import {chunks} from "./stream.js";

const $ = id => document.getElementById(id);
const OPTIONS = [["system", "text", "system prompt"], ["temperature", "number", "0: greedy"], ["top_p", "number", "0 to 1"],
  ["top_k", "number", "0: off"], ["min_p", "number", "0 to 1"], ["repetition_penalty", "number", "1: off"],
  ["max_tokens", "number", "context"], ["seed", "number", "random"], ["stop_at", "text", "a text"], ["api_key", "password", "none"]];
const EXAMPLES = ["What is 17 + 25?", "Count from 1 to 20.", "Reverse the order of these words: Rome, Oslo, Lima"];
const NEAR_END_PIXELS = 80, CURRENT = "minisgl.current";
let chat = newChat(), views = [], running = null, edited = null;

// --- what is asked

function headers() {
  const key = $("api_key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

function requestFor(turns, question) {
  const system = $("system").value, messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns)
    if (turn.answer) messages.push({role: "user", content: turn.question}, {role: "assistant", content: turn.answer});
  messages.push({role: "user", content: question});
  const body = {messages, stream: true, stream_options: {include_usage: true}};
  for (const [name, type] of OPTIONS)
    if (type === "number" && $(name).value !== "") body[name] = Number($(name).value);
  if ($("stop_at").value) body.stop = $("stop_at").value;
  return body;
}

function ask(question) {
  if (edited !== null) {
    chat.turns.length = edited;
    edited = null;
    showChat();
  }
  const turn = {question, answer: ""};
  chat.turns.push(turn);
  addView(turn);
  answer(chat, turn, views.at(-1));
}

function regenerate() {
  if (running) return;
  cancelEdit();
  answer(chat, chat.turns.at(-1), views.at(-1));
}

// Everything below belongs to the chat that it began with, whichever one is shown by then.
async function answer(ofChat, turn, view) {
  const before = {...turn}, began = performance.now(), run = running = {abort: new AbortController(), view};
  let usage = null, first = null, cut = false;
  Object.assign(turn, {answer: "", thoughts: "", note: "", error: "", state: "stopped"});
  showBusy();
  view.update(true);
  keep(ofChat);
  try {
    const body = requestFor(ofChat.turns.slice(0, ofChat.turns.indexOf(turn)), turn.question);
    for await (const chunk of chunks(body, headers(), run.abort.signal)) {
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      first ??= performance.now();
      turn.thoughts += choice.delta.reasoning_content || "";
      turn.answer += choice.delta.content || "";
      cut ||= choice.finish_reason === "length";
      view.updateSoon();
    }
    turn.state = "done";
  } catch (error) {
    if (error.name !== "AbortError") Object.assign(turn, {state: "failed", error: error.message});
  }
  if (turn.state !== "done" && !turn.answer && before.answer) Object.assign(turn, before, {error: turn.error});
  else turn.note = note(turn, usage, cut, began, first);
  if (running === run) running = null;
  view.update(true);
  keep(ofChat);
  showBusy();
}

function note(turn, usage, cut, began, first) {
  if (turn.state === "stopped") return turn.answer ? "stopped" : "stopped before the first token";
  if (!usage) return "";
  const now = performance.now(), rate = usage.completion_tokens / (now - began) * 1000;
  return `${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out, first after ${((first ?? now) - began).toFixed(0)} ms, ` +
    `${rate.toFixed(1)} tokens/s${cut ? "; cut at max_tokens or the end of the context" : ""}`;
}

function stop() {
  running?.abort.abort();
}

// --- what is shown

class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.box = element("div", "turn");
    this.thoughts = element("details");
    this.thoughts.append(element("summary", "", "thoughts"), element("span"));
    this.answerBox = element("div", "message answer");
    this.answer = new Answer(this.answerBox);
    this.error = element("div", "message error");
    this.note = element("small");
    this.actions = element("div", "actions");
    this.box.append(element("div", "message user", turn.question), this.thoughts, this.answerBox, this.error, this.note, this.actions);
    this.update();
  }

  // At most once in a frame: tokens come faster than a screen shows them. `follow`: to the end, wherever the reader is.
  updateSoon() {
    this.frame ||= requestAnimationFrame(() => this.update());
  }

  update(follow = false) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const log = $("log"), atEnd = follow && this.box.isConnected && running?.view === this ||
      log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PIXELS;
    const {thoughts, answer, error, note} = this.turn;
    this.thoughts.hidden = !thoughts;
    this.thoughts.lastChild.textContent = thoughts || "";
    this.answer.update(answer);
    this.error.textContent = error || "";
    this.error.hidden = !error;
    this.note.textContent = note || "";
    this.showActions();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  showActions() {
    const isLast = views.at(-1) === this, names = running?.view === this ? "" : `${isLast}${Boolean(this.turn.answer)}`;
    if (this.actions.dataset.names === names) return;
    this.actions.dataset.names = names;
    this.actions.replaceChildren();
    if (!names) return;
    if (this.turn.answer) {
      const button = action("Copy", () => copy(this.turn.answer, button));
      this.actions.append(button);
    }
    if (isLast)
      this.actions.append(action(this.turn.answer ? "Regenerate" : "Try again", regenerate), action("Edit the question", edit));
  }
}

function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), {className, textContent: text});
}

function action(label, act) {
  const button = Object.assign(element("button", "", label), {type: "button"});
  button.addEventListener("click", act);
  return button;
}

function addView(turn) {
  $("empty")?.remove();
  views.push(new TurnView(turn));
  $("log").append(views.at(-1).box);
  views.at(-2)?.showActions();
  views.at(-1).showActions();
}

function showChat() {
  views = [];
  $("log").replaceChildren();
  chat.turns.forEach(addView);
  if (!views.length) showExamples();
  $("log").scrollTop = $("log").scrollHeight;
}

function showExamples() {
  const box = element("div");
  box.id = "empty";
  box.append(element("p", "", "Ask the model something, for example:"));
  for (const text of EXAMPLES) box.append(action(text, () => { if (!running) ask(text); }));
  $("log").append(box);
}

function showBusy() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  views.forEach(view => view.showActions());
}

// --- chats

function keep(ofChat) {
  if (ofChat.deleted) return;
  const kept = saveChat(ofChat);
  $("chats").firstElementChild.textContent = kept ? "Chats, kept in this browser" : "Chats (this one cannot be kept)";
  if (ofChat === chat) remember(CURRENT, chat.id);
  showList();
}

function open(next) {
  stop();
  running = null;
  cancelEdit();
  chat = next;
  remember(CURRENT, chat.turns.length ? chat.id : "");
  showChat();
  showBusy();
  showList();
  closeDrawers();
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus();  // a phone's keyboard would cover the chat
}

function drop(id) {
  deleteChat(id);
  if (id === chat.id) { chat.deleted = true; open(newChat()); } else showList();
}

function showList() {
  const kept = allChats();
  $("delete-all").hidden = !kept.length;
  $("chat-list").replaceChildren(...kept.map(one => {
    const item = element("li", one.id === chat.id ? "current" : "");
    const title = action(titleOf(one), () => { const found = loadChat(one.id); if (found && one.id !== chat.id) open(found); else closeDrawers(); });
    const remove = action("×", () => drop(one.id));
    title.className = "title";
    title.title = titleOf(one);
    remove.className = "delete";
    remove.setAttribute("aria-label", `Delete «${titleOf(one)}»`);
    item.append(title, remove);
    return item;
  }));
}

function edit() {
  if (running) return;
  edited = chat.turns.length - 1;
  views.at(-1).box.classList.add("edited");
  $("prompt").value = chat.turns[edited].question;
  $("prompt").focus();
}

function cancelEdit() {
  if (edited === null) return;
  edited = null;
  views.at(-1).box.classList.remove("edited");
  $("prompt").value = "";
}

// --- the rest of the page

// A tab's own memory, which a browser may refuse.
function remember(name, value) {
  try { sessionStorage.setItem(name, value); } catch { /* it lasts as long as the page */ }
}
function remembered(name) {
  try { return sessionStorage.getItem(name) || ""; } catch { return ""; }
}

function addOptions() {
  for (const [name, type, hint] of OPTIONS) {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, {id: name, type, placeholder: hint, step: "any", value: remembered(name), autocomplete: "off"});
    input.addEventListener("change", () => {
      remember(name, input.value);
      if (name === "api_key") nameModel();
    });
    label.append(name.replaceAll("_", " "), input);
    $("options").append(label);
  }
}

async function nameModel() {
  try {
    const reply = await fetch("v1/models", {headers: headers()});
    const said = await reply.json();
    $("model").textContent = $("model").title = reply.ok ? said.data.map(model => model.id).join(", ") : said.error.message;
    $("model").classList.toggle("error", !reply.ok);
    nameModel.known = reply.ok || reply.status === 401;  // with a key that is wrong, a new one is waited for
  } catch { nameModel.known = false; }
}

const DRAWERS = [["chats", "open-chats"], ["panel", "open-panel"]];
function toggleDrawer(name) {
  for (const [drawer, button] of DRAWERS) {
    const isOpen = drawer === name && !$(drawer).classList.contains("open");
    $(drawer).classList.toggle("open", isOpen);
    $(button).setAttribute("aria-expanded", isOpen);
  }
  $("shade").hidden = !document.querySelector("nav.open, aside.open");
}
function closeDrawers() {
  toggleDrawer("");
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (text && !running) { $("prompt").value = ""; ask(text); }
});
$("prompt").addEventListener("keydown", event => {
  // An input method's Enter takes a candidate; Safari tells of its end first, with the key code of a composition.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (!$("shade").hidden) closeDrawers();
  else if (edited !== null) cancelEdit();
  else stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => open(newChat()));
$("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all chats that this browser keeps?")) return;
  deleteAllChats();
  chat.deleted = true;
  open(newChat());
});
for (const [drawer, button] of DRAWERS) $(button).addEventListener("click", () => toggleDrawer(drawer));
$("shade").addEventListener("click", closeDrawers);
window.addEventListener("pagehide", () => { if (running) saveChat(chat); });

addOptions();
open(loadChat(remembered(CURRENT)) || newChat());
$("prompt").value = new URLSearchParams(location.search).get("q") || "";
nameModel();
watchEngine(answers => { if (answers && !nameModel.known) nameModel(); });
