// Chats that outlive a reload: each under a key of its own in the browser's storage, so that two tabs overwrite nothing
// of each other. Two tabs with the same chat merge it turn by turn.
//
// A chat is {id, time, settings, shown, turns}. A turn is a question with its answer: {id, parent, made, time, question,
// files, answer, thoughts, calls, state, note, error, cut, deleted}; times are milliseconds, `made` never changes, and of
// two copies of a turn the one with the later `time` counts. Turns with the same parent are branches of the conversation;
// `shown` names the one that is looked at, by parent. A deleted turn stays as a mark: whatever came after it follows what
// came before. `settings` is {time, title, system, options}.
const PREFIX = "minisgl.chat.", MAX_CHATS = 50, MAX_CHARACTERS = 2_000_000, TITLE_CHARACTERS = 60;
const TURN = {files: [], answer: "", thoughts: "", calls: [], state: "", note: "", error: "", cut: false, deleted: false};

export function newChat(settings = {}) {
  return {id: newId(), time: Date.now(), settings: {system: "", options: {}, ...settings, title: "", time: Date.now()}, shown: {}, turns: []};
}

function newId() {
  return Date.now().toString(36) + [...crypto.getRandomValues(new Uint32Array(2))].map(part => part.toString(36)).join("");
}

export function addTurn(chat, parent, question, files) {
  const turn = {...TURN, id: newId(), parent, made: Date.now(), time: Date.now(), question, files, calls: []};
  chat.turns.push(turn);
  chat.shown[parent] = turn.id;
  return turn;
}

// The turns that follow `parent` ("" for the first ones), the oldest first: branches where there are several.
export function branches(chat, parent) {
  const byId = new Map(chat.turns.map(turn => [turn.id, turn]));
  const parentOf = turn => {
    let id = turn.parent;
    for (let steps = byId.size; byId.get(id)?.deleted && steps; steps--) id = byId.get(id).parent;
    return byId.has(id) ? id : "";
  };
  return chat.turns.filter(turn => !turn.deleted && parentOf(turn) === parent)
    .sort((a, b) => a.made - b.made || (a.id < b.id ? -1 : 1));
}

// What is looked at, from the first turn to the last.
export function path(chat) {
  const turns = [];
  for (let parent = ""; turns.length <= chat.turns.length; parent = turns.at(-1).id) {
    const found = branches(chat, parent);
    if (!found.length) break;
    turns.push(found.find(turn => turn.id === chat.shown[parent]) || found.at(-1));
  }
  return turns;
}

export function titleOf(chat) {
  const first = path(chat)[0];
  return chat.settings.title || (first ? (first.question || first.files[0]?.name || "").slice(0, TITLE_CHARACTERS) : "") || "untitled";
}

export function contains(chat, words) {
  const found = text => text.toLowerCase().includes(words.toLowerCase());
  return found(titleOf(chat)) || chat.turns.some(turn => !turn.deleted && (found(turn.question) || found(turn.answer)));
}

// Takes from `other`, a copy of the same chat, what is newer there. Turns stay the objects that they are.
export function mergeInto(chat, other) {
  const own = new Map(chat.turns.map(turn => [turn.id, turn]));
  for (const turn of other.turns) {
    const mine = own.get(turn.id);
    if (!mine) chat.turns.push(turn);
    else if (turn.time > mine.time) Object.assign(mine, turn);
  }
  if (other.settings.time > chat.settings.time) chat.settings = other.settings;
  chat.shown = {...other.shown, ...chat.shown};
  chat.time = Math.max(chat.time, other.time);
}

export function loadChat(id) {
  try { return asChat(JSON.parse(localStorage.getItem(PREFIX + id))); } catch { return null; }
}

// All that are kept, the newest first.
export function allChats() {
  return ids().map(loadChat).filter(Boolean).sort((a, b) => b.time - a.time);
}

// {kept: whether the chat is kept, as a browser may keep nothing (a private window, a full disk), removed: the titles of
// chats that had to go, the oldest first}.
export function saveChat(chat) {
  const removed = [];
  if (!chat.turns.length) return {kept: true, removed};
  const stored = loadChat(chat.id);
  if (stored) mergeInto(chat, stored);
  chat.time = Date.now();
  const text = JSON.stringify(chat);
  let room = MAX_CHARACTERS - text.length;
  allChats().filter(kept => kept.id !== chat.id).forEach((kept, index) => {
    room -= JSON.stringify(kept).length;
    if (index >= MAX_CHATS - 1 || room < 0) { deleteChat(kept.id); removed.unshift(titleOf(kept)); }
  });
  if (text.length > MAX_CHARACTERS) { deleteChat(chat.id); return {kept: false, removed}; }
  try { localStorage.setItem(PREFIX + chat.id, text); return {kept: true, removed}; } catch { return {kept: false, removed}; }
}

export function deleteChat(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* nothing is kept */ }
}

// Calls `changed` with the id of a chat that another tab has stored or, with true behind it, deleted.
export function watchOtherTabs(changed) {
  window.addEventListener("storage", event => {
    if (event.key?.startsWith(PREFIX)) changed(event.key.slice(PREFIX.length), event.newValue === null);
  });
}

// `pictures`: data URLs by the ids that the chats name.
export function exported(chats, pictures) {
  return JSON.stringify({format: "minisgl-chats", version: 1, chats, pictures}, null, 1);
}

// {chats, pictures: [id, data URL]} of an exported file. Throws Error with words for the reader.
export function imported(text) {
  let chats = null, pictures = {};
  try { ({chats, pictures = {}} = JSON.parse(text)); } catch { /* told below */ }
  if (!Array.isArray(chats)) throw new Error("this is no file of exported chats");
  const good = chats.map(asChat).filter(Boolean);
  if (good.length < chats.length) throw new Error(`${chats.length - good.length} of ${chats.length} chats in this file are damaged`);
  return {chats: good, pictures: Object.entries(pictures ?? {}).filter(([, url]) => typeof url === "string" && /^data:image\//.test(url))};
}

function ids() {
  try {
    return Object.keys(localStorage).filter(key => key.startsWith(PREFIX)).map(key => key.slice(PREFIX.length));
  } catch { return []; }
}

// A stored value as a chat with all its fields, or null. Chats that were stored before there were branches have turns
// without ids, one behind the other.
function asChat(value) {
  const isText = text => typeof text === "string";
  if (!isText(value?.id) || !Array.isArray(value.turns) || !value.turns.length) return null;
  const turns = value.turns.map((turn, index) => {
    const id = turn?.id ?? `${value.id}.${index}`, parent = turn?.parent ?? (index ? `${value.id}.${index - 1}` : "");
    return {...TURN, made: index, time: 0, ...turn, id, parent};
  });
  if (!turns.every(turn => [turn.id, turn.parent, turn.question, turn.answer, turn.thoughts].every(isText) &&
      Array.isArray(turn.files) && turn.files.every(file => isText(file?.kind) && isText(file.name) && isText(file.data)) &&
      Array.isArray(turn.calls) && turn.calls.every(call => isText(call?.name) && isText(call.arguments)))) return null;
  const {title, system, options, time} = value.settings || {};
  const settings = {time: Number(time) || 0, title: isText(title) ? title : "", system: isText(system) ? system : "",
    options: options && typeof options === "object" ? options : {}};
  return {id: value.id, time: Number(value.time) || 0, settings, shown: {...value.shown}, turns};
}
