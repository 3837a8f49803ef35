// Pictures of questions, in the browser's database: chats name them by their ids, and so stay small.
const STORE = "pictures", MAX_CHARACTERS = 256_000_000, UNUSED_MS = 3_600_000;
const held = new Map();  // data URLs by id, where the browser keeps none
let opening = null;

// The id has the time and the length, so that old and large ones are found without reading any.
const newId = data => [Date.now(), data.length, crypto.getRandomValues(new Uint32Array(1))[0]].map(part => part.toString(36)).join("-");
const [timeOf, lengthOf] = [0, 1].map(place => id => parseInt(id.split("-")[place], 36) || 0);

async function ask(mode, act) {
  opening ??= settled(Object.assign(indexedDB.open("minisgl", 1), {
    onupgradeneeded: ({target}) => target.result.createObjectStore(STORE),
  }));
  return settled(act((await opening).transaction(STORE, mode).objectStore(STORE)));
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

// The id of a picture, a data URL, under which it is kept. Without a database it lasts as long as the page.
export async function keepPicture(data) {
  const id = newId(data);
  try { await ask("readwrite", store => store.put(data, id)); } catch { held.set(id, data); }
  return id;
}

// The data URL, or "" where it is not kept any more.
export async function keptPicture(id) {
  try { return held.get(id) || await ask("readonly", store => store.get(id)) || ""; } catch { return ""; }
}

// Drops the pictures that are not among `used`, but for those of the last `unusedMs` milliseconds, and the oldest of too many.
export async function tidyPictures(used, unusedMs = UNUSED_MS) {
  try {
    let room = MAX_CHARACTERS;
    for (const id of (await ask("readonly", store => store.getAllKeys())).sort((a, b) => timeOf(b) - timeOf(a))) {
      const goes = lengthOf(id) > room || !used.has(id) && Date.now() - timeOf(id) >= unusedMs;
      if (goes) await ask("readwrite", store => store.delete(id));
      else room -= lengthOf(id);
    }
  } catch { /* nothing is kept */ }
}
