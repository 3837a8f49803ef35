// Files that go with a question. An attachment is {kind, name, data}; `data` is text. A further kind is a row of KINDS.
const MAX_BYTES = 256 * 1024, MAX_FILES = 10, FENCE = /`{3,}/g;

// By kind: what of a file it takes, how it reads one, and how that stands in a message.
const KINDS = {
  text: {
    takes: () => true,
    async read(file) {
      const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("a NUL in it");
      return text;
    },
    refusal: "is no text in UTF-8",
    // Fenced with more backticks than the text itself has in a row.
    inMessage({name, data}) {
      const fence = "`".repeat(Math.max(2, ...(data.match(FENCE) || []).map(run => run.length)) + 1);
      return `${name}\n${fence}\n${data}${data.endsWith("\n") ? "" : "\n"}${fence}`;
    },
  },
};

// The attachments of `files`, beside `held` that are there. Throws Error with words for the reader.
export async function read(files, held) {
  if (held.length + files.length > MAX_FILES) throw new Error(`at most ${MAX_FILES} files go with a question`);
  return Promise.all([...files].map(async file => {
    const [kind, {read: readFile, refusal}] = Object.entries(KINDS).find(([, row]) => row.takes(file));
    if (file.size > MAX_BYTES)
      throw new Error(`${file.name} has ${(file.size / 1024).toFixed(0)} KiB; a file may have ${MAX_BYTES / 1024} KiB`);
    try { return {kind, name: file.name, data: await readFile(file)}; } catch (error) {
      throw new Error(error instanceof TypeError ? `${file.name} ${refusal}` : `${file.name} cannot be read`);
    }
  }));
}

// A question with its files, as the content of a message.
export function contentOf({question, files}) {
  return [...files.map(file => KINDS[file.kind]?.inMessage(file) ?? ""), question].filter(Boolean).join("\n\n");
}
