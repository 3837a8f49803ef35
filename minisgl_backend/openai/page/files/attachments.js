// Files that go with a question. An attachment is {kind, name, data}; `data` is text: of a text file its own, of a picture
// the id that it is kept by. A further kind is a row of KINDS.
import {fileBox, pictureBox} from "./elements.js";
import {keepPicture, keptPicture} from "./pictures.js";

const MAX_FILES = 10, FENCE = /`{3,}/g, KIB = 1024;
const SERVED = /^image\/(jpeg|png|webp|gif|bmp|tiff|avif)$/, PICTURE = /^image\/(?!svg)/;

// By kind: what of a file it takes, how large one may be, how it is read, seen and stands in a message: as a text, or as a
// part of the content.
const KINDS = {
  image: {
    takes: file => PICTURE.test(file.type),
    maxBytes: 20 * KIB * KIB,
    read: async file => keepPicture(await urlOf(SERVED.test(file.type) ? file : await asJpeg(file))),
    refusal: "is no picture that this browser can read",
    box: ({name, data}) => pictureBox(name, keptPicture(data)),
    async inMessage({name, data}) {
      const url = await keptPicture(data);
      if (!url) throw new Error(`${name} is not kept in this browser any more; delete its question to go on`);
      return {type: "image_url", image_url: {url}};
    },
  },
  text: {
    takes: () => true,
    maxBytes: 256 * KIB,
    async read(file) {
      const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("a NUL in it");
      return text;
    },
    refusal: "is no text in UTF-8",
    box: fileBox,
    // Fenced with more backticks than the text itself has in a row.
    inMessage({name, data}) {
      const fence = "`".repeat(Math.max(2, ...(data.match(FENCE) || []).map(run => run.length)) + 1);
      return `${name}\n${fence}\n${data}${data.endsWith("\n") ? "" : "\n"}${fence}`;
    },
  },
};

const sizeOf = bytes => bytes < KIB * KIB ? `${(bytes / KIB).toFixed(0)} KiB` : `${(bytes / KIB / KIB).toFixed(0)} MiB`;

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = Object.assign(new FileReader(), {onload: () => resolve(reader.result), onerror: () => reject(reader.error)});
    reader.readAsDataURL(blob);
  });
}

// What the server does not take, as a phone's HEIC, where the browser can decode it.
async function asJpeg(file) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new TypeError("not decoded"); });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas.convertToBlob({type: "image/jpeg", quality: 0.92});
}

// Throws Error with words for the reader where a question has too many attachments.
export function checkNumber(attached, maxImages) {
  if (attached.length > MAX_FILES) throw new Error(`at most ${MAX_FILES} files go with a question`);
  const pictures = attached.filter(file => file.kind === "image").length;
  if (maxImages !== null && pictures > maxImages)
    throw new Error(maxImages ? `this server takes at most ${maxImages} pictures` : "this model sees no pictures");
}

// The attachments of `files`, beside `held` that are there. `maxImages`: that the model takes in a request; null: not known.
// Throws Error with words for the reader.
export async function read(files, held, maxImages) {
  const kinds = [...files].map(file => Object.keys(KINDS).find(kind => KINDS[kind].takes(file)));
  checkNumber([...held, ...kinds.map(kind => ({kind}))], maxImages);
  return Promise.all([...files].map(async (file, index) => {
    const kind = kinds[index], {maxBytes, read: readFile, refusal} = KINDS[kind];
    if (file.size > maxBytes) throw new Error(`${file.name} has ${sizeOf(file.size)}; a file may have ${sizeOf(maxBytes)}`);
    try { return {kind, name: file.name, data: await readFile(file)}; } catch (error) {
      throw new Error(error instanceof TypeError ? `${file.name} ${refusal}` : `${file.name} cannot be read`);
    }
  }));
}

// The row of an attachment; null for a kind of another version, or of none: chats are imported.
const kindOf = file => Object.hasOwn(KINDS, file.kind) ? KINDS[file.kind] : null;

// How an attachment is seen.
export function boxOf(file) {
  return (kindOf(file) ?? KINDS.text).box(file);
}

const picturesIn = chats => chats.flatMap(chat => chat.turns).flatMap(turn => turn.files).filter(file => file.kind === "image");

// The ids of the pictures that chats name.
export function picturesOf(chats) {
  return new Set(picturesIn(chats).map(file => file.data));
}

// Keeps the pictures of imported chats, [id, data URL], under ids of this browser's own, by which the chats name them then:
// an id from elsewhere may lie about time and length, or be that of another picture.
export async function takePictures(chats, pictures) {
  const named = picturesOf(chats), taken = new Map();
  for (const [id, url] of pictures) if (named.has(id)) taken.set(id, await keepPicture(url));
  for (const file of picturesIn(chats)) file.data = taken.get(file.data) ?? file.data;
}

// A question with its files, as the content of a message: a text, or parts where there are pictures. Throws Error with words
// for the reader.
export async function contentOf({question, files}) {
  const parts = await Promise.all(files.map(file => kindOf(file)?.inMessage(file) ?? ""));
  const filled = [...parts, question].filter(Boolean);
  if (filled.every(part => typeof part === "string")) return filled.join("\n\n");
  return filled.map(part => typeof part === "string" ? {type: "text", text: part} : part);
}
