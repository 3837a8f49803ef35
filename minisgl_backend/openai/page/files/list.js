// The list of chats: search, titles, deletion, export and import.
import {allChats, contains, deleteChat, exported, imported, loadChat, mergeInto, saveChat, titleOf} from "./chats.js";
import {picturesOf, takePictures} from "./attachments.js";
import {$, button, element} from "./elements.js";
import {notice} from "./notice.js";
import {keptPicture} from "./pictures.js";

const MAX_IMPORT_BYTES = 300_000_000;

// `page` is what the list may ask for: current() the chat that is shown, open(chat), close() where it is deleted, and
// renamed() after a title of it has changed.
export function addList(page) {
  const show = () => showList(page);
  $("search").addEventListener("input", show);
  $("export").addEventListener("click", save);
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    await load($("import-file").files[0]);
    $("import-file").value = "";
    show();
  });
  $("delete-all").addEventListener("click", () => {
    if (confirm("Delete all chats that this browser keeps?")) remove(page, allChats());
  });
  return show;
}

function showList(page) {
  const kept = allChats(), current = page.current().id, wanted = $("search").value.trim();
  for (const id of ["delete-all", "export"]) $(id).hidden = !kept.length;
  $("search").hidden = !kept.length;
  $("chat-list").replaceChildren(...kept.filter(one => !wanted || contains(one, wanted)).map(one => {
    const item = element("li", one.id === current ? "current" : ""), title = titleOf(one);
    const name = button(title, () => page.open(one.id));
    name.className = "title";
    name.dir = "auto";
    name.title = title;
    const rename = button("✎", () => edit(page, item, one), `Rename «${title}»`);
    const gone = button("×", () => remove(page, [one]), `Delete «${title}»`);
    rename.className = gone.className = "small";
    gone.classList.add("delete");
    item.append(name, rename, gone);
    return item;
  }));
}

function edit(page, item, one) {
  const field = Object.assign(element("input"), {value: titleOf(one), dir: "auto"});
  field.setAttribute("aria-label", "The chat's title");
  let isDone = false;
  const done = keep => {
    if (isDone) return;
    isDone = true;
    const chat = page.current().id === one.id ? page.current() : loadChat(one.id);
    if (keep && chat) {
      Object.assign(chat.settings, {title: field.value.trim(), time: Date.now()});
      saveChat(chat);
      page.renamed();
    }
    showList(page);
  };
  field.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.isComposing) done(true);
    if (event.key === "Escape") { event.stopPropagation(); done(false); }
  });
  field.addEventListener("blur", () => done(true));
  item.replaceChildren(field);
  field.select();
}

function remove(page, chats) {
  for (const {id} of chats) deleteChat(id);
  const isCurrent = chats.some(({id}) => id === page.current().id);
  if (isCurrent) page.close();
  showList(page);
  notice(chats.length === 1 ? `«${titleOf(chats[0])}» is deleted` : `${chats.length} chats are deleted`, () => {
    chats.reverse().forEach(saveChat);
    if (isCurrent && chats.length === 1) page.open(chats[0].id);
    showList(page);
  });
}

async function save() {
  const chats = allChats(), pictures = {};
  for (const id of picturesOf(chats)) pictures[id] = await keptPicture(id);
  const link = document.createElement("a"), file = new Blob([exported(chats, pictures)], {type: "application/json"});
  const url = URL.createObjectURL(file);
  Object.assign(link, {href: url, download: "chats.json"}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function load(file) {
  if (!file) return;
  try {
    if (file.size > MAX_IMPORT_BYTES) throw new Error(`the file has more than ${MAX_IMPORT_BYTES / 1e6} MB`);
    const {chats, pictures} = imported(await file.text());
    await takePictures(chats, pictures);
    let kept = 0;
    for (const chat of chats.reverse()) {
      const stored = loadChat(chat.id);
      if (stored) mergeInto(chat, stored);
      if (saveChat(chat).kept) kept++;
    }
    notice(kept === chats.length ? `${kept} chats are imported` : `${kept} of ${chats.length} chats are imported: there is no room for more`);
  } catch (error) { notice(error.message); }
}
