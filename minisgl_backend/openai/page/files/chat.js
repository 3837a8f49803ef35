// The page: the chat that is shown, what is asked, and what answers.
import {boxOf, checkNumber, picturesOf, read} from "./attachments.js";
import {addTurn, allChats, branches, deleteChat, loadChat, mergeInto, newChat, path, saveChat, titleOf, watchOtherTabs} from "./chats.js";
import {$, button, element, grows, words} from "./elements.js";
import {watchEngine} from "./engine.js";
import {addList} from "./list.js";
import {notice} from "./notice.js";
import {tidyPictures} from "./pictures.js";
import {requestFor} from "./requests.js";
import {addSettings, headers, remember, remembered, showSettings} from "./settings.js";
import {chunks} from "./stream.js";
import {TurnView} from "./turn.js";

const EXAMPLES = ["What is 17 + 25?", "Count from 1 to 20.", "Reverse the order of these words: Rome, Oslo, Lima"];
const NAME = document.title, DRAFT = "minisgl.draft.";
let chat = newChat(), views = [], files = [], running = null, hasTemplate = true, maxImages = null;

// --- what is asked

function ask(parent, question, attached) {
  const turn = addTurn(chat, parent, question, attached);
  showTurns();
  answer(chat, turn);
}

// Everything below belongs to the chat that it began with, whichever one is shown by then.
async function answer(ofChat, turn) {
  const run = running = {abort: new AbortController(), turn, chat: ofChat};
  const view = viewOf(turn), began = performance.now(), turns = path(ofChat);
  let usage = null, first = null;
  Object.assign(turn, {note: "", error: "", cut: false, state: "running", time: Date.now()});
  if (!turn.answer) Object.assign(turn, {thoughts: "", calls: []});
  keep(ofChat);
  view.begin();
  showBusy();
  try {
    const {route, body, textOf} = await requestFor(ofChat.settings, turns.slice(0, turns.indexOf(turn)), turn, hasTemplate);
    for await (const chunk of chunks(route, body, headers(), run.abort.signal)) {
      usage = chunk.usage || usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      first ??= performance.now();
      add(turn, textOf(choice));
      turn.cut ||= choice.finish_reason === "length";
      view.updateSoon();
    }
    Object.assign(turn, {state: "done", note: note(turn, usage, began, first)});
  } catch (error) {
    if (error.name === "AbortError") Object.assign(turn, {state: "stopped", note: turn.answer ? "stopped" : "stopped before the first token"});
    else Object.assign(turn, {state: "failed", error: error.message});
    if (error.status === 401) askForKey();
  } finally {
    turn.time = Date.now();
    if (running === run) running = null;
    view.end();
    keep(ofChat);
    showBusy();
  }
}

function add(turn, delta) {
  turn.thoughts += delta.reasoning_content || "";
  turn.answer += delta.content || "";
  for (const {index, function: called} of delta.tool_calls || []) {
    const call = turn.calls[index] ??= {name: "", arguments: ""};
    call.name += called?.name || "";
    call.arguments += called?.arguments || "";
  }
}

function note(turn, usage, began, first) {
  const parts = turn.answer || turn.calls.length ? [] : ["the model said nothing"];
  if (usage) {
    const now = performance.now(), rate = usage.completion_tokens / (now - began) * 1000;
    parts.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out, first after ${((first ?? now) - began).toFixed(0)} ms, ` +
      `${rate.toFixed(1)} tokens/s`);
  }
  if (turn.cut) parts.push("cut at max_tokens or the end of the context");
  return parts.join("; ");
}

function stop() {
  running?.abort.abort();
}

// --- what is shown

const page = {
  isRunning: () => running !== null,
  log: $("log"),
  hasTemplate: () => hasTemplate,
  branches: turn => branches(chat, siblingsOf(turn)),
  regenerate(turn) {
    if (turn.answer) ask(siblingsOf(turn), turn.question, turn.files);
    else { showTurns(); answer(chat, turn); }
  },
  goOn: turn => answer(chat, turn),
  ask: (turn, question) => ask(siblingsOf(turn), question, turn.files),
  remove(turn) {
    mark(turn, true);
    notice("the question and its answer are deleted", () => mark(turn, false));
  },
  show(turn, branch) {
    chat.shown[siblingsOf(turn)] = branch.id;
    keep(chat);
    showTurns();
  },
};

// What `turn` follows in what is shown: the key of its branches.
function siblingsOf(turn) {
  const turns = path(chat);
  return turns[turns.indexOf(turn) - 1]?.id || "";
}

function mark(turn, deleted) {
  Object.assign(turn, {deleted, time: Date.now()});
  if (chat.turns.every(one => one.deleted)) deleteChat(chat.id);
  else keep(chat);
  showTurns();
  showList();
}

// The view of a turn; one of another chat is seen by nobody.
function viewOf(turn) {
  return views.find(view => view.turn === turn) || new TurnView(turn, page);
}

// Views of turns that stay are kept: an answer may be coming in one.
function showTurns() {
  const turns = path(chat), kept = new Map(views.map(view => [view.turn, view]));
  const end = $("log").scrollTop;
  views = turns.map(turn => kept.get(turn) || new TurnView(turn, page));
  $("log").replaceChildren(...systemLine(), ...(views.length ? views.map(view => view.box) : [examples()]));
  for (const view of views) { view.showActions(); view.updateSoon(); }
  $("log").scrollTop = turns.length > kept.size || !kept.size ? $("log").scrollHeight : end;
  document.title = turns.length ? `${titleOf(chat)} - ${NAME}` : NAME;
}

function systemLine() {
  if (!chat.settings.system || !hasTemplate) return [];
  const line = element("div", "message system");
  line.append(words("span", "", chat.settings.system), button("Edit", () => { openDrawer("panel"); $("system").focus(); }, "Edit the system prompt"));
  return [line];
}

function examples() {
  const box = element("div");
  box.id = "empty";
  box.append(element("p", "", hasTemplate ? "Ask the model something, for example:" :
    "This model has no chat template: it goes on with the text that you send."));
  if (hasTemplate) for (const text of EXAMPLES) box.append(button(text, () => { if (!running) ask("", text, []); }));
  return box;
}

function showBusy() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("log").setAttribute("aria-busy", Boolean(running));
  for (const view of views) view.showActions();
}

// --- chats

function keep(ofChat) {
  if (ofChat.deleted) return;
  const {kept, removed} = saveChat(ofChat);
  $("kept").textContent = kept ? "Chats, kept in this browser" : "Chats (this one cannot be kept)";
  if (removed.length) notice(`no room for all chats: ${removed.map(title => `«${title}»`).join(", ")} had to go`);
  if (ofChat === chat && chat.turns.length && location.hash.slice(1) !== chat.id) history.replaceState(null, "", `#${chat.id}`);
  showList();
}

function open(next) {
  stop();
  running = null;
  chat = next;
  files = [];
  views = [];
  showTurns();
  showSettings(chat.settings);
  showBusy();
  showFiles();
  showList();
  closeDrawers();
  $("prompt").value = remembered(draftName());
  $("prompt").dispatchEvent(new Event("input"));
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus();  // a phone's keyboard would cover the chat
}

// As `open`, with a step in the browser's history.
function visit(next) {
  const hash = next.turns.length ? `#${next.id}` : "";
  keepDraft();
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  open(next);
}

const startNew = () => visit(newChat({system: chat.settings.system, options: {...chat.settings.options}}));
const showList = addList({
  current: () => chat,
  open: id => { const found = id === chat.id ? null : loadChat(id); if (found) visit(found); else closeDrawers(); },
  close: () => { chat.deleted = true; startNew(); },
  renamed: showTurns,
});

// What is typed and not sent, by chat; all new ones share it.
const draftName = () => DRAFT + (chat.turns.length ? chat.id : "new");
const keepDraft = () => remember(draftName(), $("prompt").value);

watchOtherTabs((id, isDeleted) => {
  if (id === chat.id && isDeleted && running?.chat !== chat) {
    chat.deleted = true;
    open(newChat());
    notice("this chat was deleted in another tab");
  } else if (id === chat.id && !isDeleted) {
    const other = loadChat(id);
    if (other) mergeInto(chat, other);
    for (const view of views) { view.showQuestion(); if (!view.run) { view.answer.reset(); view.update(); } }
    showTurns();
    showSettings(chat.settings);
  }
  showList();
});

// --- files of the next question

async function attach(added) {
  if (!added.length) return;
  const ofChat = chat;
  try {
    const taken = await read(added, files, maxImages);
    if (chat !== ofChat) return;
    checkNumber([...files, ...taken], maxImages);  // others may have come meanwhile
    files = [...files, ...taken];
  } catch (error) { notice(error.message); }
  showFiles();
}

function showFiles() {
  $("files").hidden = !files.length;
  $("files").replaceChildren(...files.map(file => {
    const chip = element("div", "chip");
    chip.append(boxOf(file), button("×", () => { files = files.filter(one => one !== file); showFiles(); }, `Remove ${file.name}`));
    return chip;
  }));
}

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await attach([...$("file").files]); $("file").value = ""; });
$("prompt").addEventListener("paste", event => {
  if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  const text = event.dataTransfer.getData("text/plain");
  if (!event.dataTransfer.files.length && (event.target === $("prompt") || !text)) return;
  event.preventDefault();  // else the browser leaves the page for the file
  if (event.dataTransfer.files.length) attach([...event.dataTransfer.files]);
  else { $("prompt").value += text; $("prompt").dispatchEvent(new Event("input")); }
});

// --- the rest of the page

async function nameModel() {
  try {
    const reply = await fetch("v1/models", {headers: headers()});
    const said = await reply.json();
    $("model").textContent = $("model").title = reply.ok ? said.data.map(model => model.id).join(", ") : said.error.message;
    $("model").classList.toggle("error", !reply.ok);
    $("enter-key").hidden = reply.status !== 401;
    nameModel.known = reply.ok || reply.status === 401;  // with a key that is wrong, a new one is waited for
    if (reply.ok) await findTemplate();
  } catch { nameModel.known = false; }
}

// A base model has no chat template, and goes on with a text.
async function findTemplate() {
  const reply = await fetch("tokenizer_info", {headers: headers()});
  if (!reply.ok) return;
  const {chat_template: template, max_images: images = null} = await reply.json();
  maxImages = images;
  if (hasTemplate === (template !== null)) return;
  hasTemplate = !hasTemplate;
  $("prompt").placeholder = hasTemplate ? "Ask something; Enter sends" : "A text to go on with; Enter sends";
  if (running) return;
  views = [];
  showTurns();
}

function askForKey() {
  $("enter-key").hidden = false;
}
$("enter-key").addEventListener("click", () => { openDrawer("panel"); $("api_key").focus(); });

const DRAWERS = [["chats", "open-chats"], ["panel", "open-panel"]];
function openDrawer(name) {
  for (const [drawer, opener] of DRAWERS) {
    const isOpen = drawer === name;
    $(drawer).classList.toggle("open", isOpen);
    $(opener).setAttribute("aria-expanded", isOpen);
  }
  // Where the window is wide, both stand beside the conversation.
  $("shade").hidden = !name || getComputedStyle($(name)).position !== "fixed";
}
const closeDrawers = () => openDrawer("");

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text && !files.length || running) return;
  $("prompt").value = "";
  keepDraft();
  $("prompt").dispatchEvent(new Event("input"));
  const attached = files;
  files = [];
  showFiles();
  ask(path(chat).at(-1)?.id || "", text, attached);
});
$("prompt").addEventListener("keydown", event => {
  // An input method's Enter takes a candidate; Safari tells of its end first, with the key code of a composition.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", event => {
  if (event.key === "O" && event.ctrlKey && event.shiftKey) { event.preventDefault(); startNew(); }
  if (event.key !== "Escape" || event.isComposing) return;
  if (!$("shade").hidden) closeDrawers();
  else stop();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startNew);
for (const [drawer, opener] of DRAWERS) {
  $(opener).addEventListener("click", () => openDrawer($(drawer).classList.contains("open") ? "" : drawer));
  $(drawer).querySelector(".close").addEventListener("click", closeDrawers);
}
$("shade").addEventListener("click", closeDrawers);
window.addEventListener("popstate", () => { keepDraft(); open(loadChat(location.hash.slice(1)) || newChat()); });
window.addEventListener("pagehide", () => {
  keepDraft();
  if (!running) return;
  // No error of a connection that this very page ends.
  Object.assign(running.turn, {state: "stopped", note: "stopped: the page was left", time: Date.now()});
  saveChat(running.chat);
  running.chat.deleted = true;
});

addSettings(({system, options}) => {
  Object.assign(chat.settings, {system, options, time: Date.now()});
  if (chat.turns.length) keep(chat);
  showTurns();
}, nameModel);
grows($("prompt"));
open(loadChat(location.hash.slice(1)) || newChat());
$("prompt").value = new URLSearchParams(location.search).get("q") || $("prompt").value;
tidyPictures(picturesOf(allChats()));
nameModel();
watchEngine(answers => { if (answers && !nameModel.known) nameModel(); }, () => running !== null);
