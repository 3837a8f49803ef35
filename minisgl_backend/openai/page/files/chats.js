// Chats that outlive a reload: each under a key of its own in the browser's storage, so that two tabs overwrite
// nothing of each other. The oldest go first where there are too many, or too long ones.
const PREFIX = "minisgl.chat.", MOST_CHATS = 50, MOST_CHARACTERS = 2_000_000, TITLE_CHARACTERS = 60;

export function newChat() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return {id: random.join("-"), time: Date.now(), turns: []};
}

export function titleOf(chat) {
  return chat.turns[0].question.slice(0, TITLE_CHARACTERS);
}

export function loadChat(id) {
  try { return isChat(JSON.parse(localStorage.getItem(PREFIX + id))); } catch { return null; }
}

// All that are kept, the newest first.
export function allChats() {
  return ids().map(loadChat).filter(Boolean).sort((a, b) => b.time - a.time);
}

// Whether the chat is kept; a browser may keep nothing (a private window, a full disk).
export function saveChat(chat) {
  if (!chat.turns.length) return true;
  chat.time = Date.now();
  const text = JSON.stringify(chat);
  let room = MOST_CHARACTERS - text.length;
  allChats().filter(kept => kept.id !== chat.id).forEach((kept, index) => {
    room -= JSON.stringify(kept).length;
    if (index >= MOST_CHATS - 1 || room < 0) deleteChat(kept.id);
  });
  if (text.length > MOST_CHARACTERS) { deleteChat(chat.id); return false; }
  try { localStorage.setItem(PREFIX + chat.id, text); return true; } catch { return false; }
}

export function deleteChat(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* nothing is kept */ }
}

export function deleteAllChats() {
  ids().forEach(deleteChat);
}

function ids() {
  try {
    return Object.keys(localStorage).filter(key => key.startsWith(PREFIX)).map(key => key.slice(PREFIX.length));
  } catch { return []; }
}

function isChat(value) {
  const known = value && typeof value.id === "string" && Array.isArray(value.turns) && value.turns.length &&
    value.turns.every(turn => typeof turn.question === "string" && typeof turn.answer === "string");
  return known ? value : null;
}
