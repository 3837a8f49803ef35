// Markdown that a model writes, as elements. HTML in it is shown as text; what the parsers make of the rest goes through
// DOMPurify before it becomes elements, and the page's policy lets no script but its own run.
import {highlight, typeset} from "./late.js";

const escape = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);
const TAGS = ["p", "br", "hr", "em", "strong", "del", "a", "code", "pre", "blockquote", "ul", "ol", "li", "input", "span",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const ATTRIBUTES = ["href", "title", "align", "start", "class", "type", "checked", "disabled"];
const DIRECTED = "p, ul, ol, blockquote, h1, h2, h3, h4, h5, h6, table";
// A text of any length is parsed in pieces of at most so many characters, so that none takes long. In a piece, emphasis
// takes time by the square of its marks, and a block in a block recurses: with more of them it is shown as text.
const PIECE = 6_000, LARGEST_BLOCK = 48_000, EMPHASIS_MARKS = 400;
const DEEP = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))){25}/m;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n`]*)\n/;
const STEP_BLOCKS = 50;  // between two looks at the clock
const FRAME_MS = 40, WAIT_BY_COST = 8;  // at most a ninth of the time goes into a block that still grows
// Marks that turn text around (a name «exe.png» into «gnp.exe»), and what would be no line break on every system.
const UNSEEN = /[\r\0\u202a-\u202e\u2066-\u2069]/g;
let parser = null;

// TeX between \( and \), \[ and \], $$ and $$, and between single $ that stand close to it, which prices do not.
function mathAt(source) {
  const inline = /^\\\(([^\n]*?)\\\)|^\$(?![\s$])((?:\\.|[^\\$\n])*?)(?<![\s\\])\$(?!\d)/.exec(source);
  if (inline) return {type: "math", raw: inline[0], tex: inline[1] ?? inline[2], display: false};
  const display = /^\\\[([^]*?)\\\]|^\$\$([^$]+?)\$\$/.exec(source);
  return display && {type: "math", raw: display[0], tex: display[1] ?? display[2], display: true};
}
const mathElement = ({tex, display}) => `<span class="math${display ? " display" : ""}">${escape(tex)}</span>`;
const MATH = {
  name: "math", level: "inline",
  start: source => { const at = source.search(/\$|\\[([]/); return at < 0 ? undefined : at; },
  // A bracket that is still open keeps its backslash.
  tokenizer: source => mathAt(source) || (/^\\[([]/.test(source) ? {type: "opening", raw: source.slice(0, 2)} : undefined),
  renderer: mathElement,
};
const OPENING = {name: "opening", renderer: token => token.raw};
const MATH_BLOCK = {
  name: "mathBlock", level: "block",
  start: source => /(?:^|\n) {0,3}(?:\$\$|\\\[)/.exec(source)?.index,
  tokenizer(source) {
    const found = /^ {0,3}(?=\$\$|\\\[)/.exec(source), math = found && mathAt(source.slice(found[0].length));
    const rest = math?.display && /^[ \t]*(?:\n|$)/.exec(source.slice(found[0].length + math.raw.length));
    return rest ? {...math, type: "mathBlock", raw: found[0] + math.raw + rest[0]} : undefined;
  },
  renderer: token => `<p>${mathElement(token)}</p>`,
};

// Made at the first answer: the libraries are there by then.
function markdown() {
  parser ??= new marked.Marked({gfm: true, breaks: true, extensions: [MATH, OPENING, MATH_BLOCK], renderer: {
    html({text, block}) {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";  // the usual line break in a table's cell
      return block ? `<p class="raw">${escape(text)}</p>` : escape(text);
    },
    image({href, text}) { return `<a href="${escape(href)}">${escape(text || href)}</a>`; },  // none is fetched
  }});
  return parser;
}

function tokensOf(source) {
  if (DEEP.test(source)) throw new RangeError("blocks in blocks, too many to parse");
  const lexer = new marked.Lexer({...markdown().defaults});
  lexer.blockTokens(source, lexer.tokens);
  for (const {src, tokens} of lexer.inlineQueue) {
    if (src.replace(/[^*_~]+/g, "").length > EMPHASIS_MARKS) tokens.push({type: "text", raw: src, text: src, escaped: false});
    else lexer.inlineTokens(src, tokens);
  }
  return lexer.tokens;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not there where the page came over plain HTTP from another machine
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}

// An element that shows a growing text. What is finished is parsed once; only the last block, which grows, anew.
export class Answer {
  constructor(element) {
    this.element = element;
    this.reset();
  }

  reset() {
    this.element.replaceChildren();
    this.seen = 0;         // how much of the given text is in `rest`, or was
    this.rest = "";        // what is not finished
    this.growing = [];     // the elements of what is not finished
    this.code = null;      // the code whose closing fence has not come: {element, end, language}
    this.head = "";        // of a table that goes on, its first two lines
    this.nextAt = 0;
  }

  // Shows `text`, which begins with what was given before. Returns whether something is left to do in a later frame.
  update(text, isWhole = false) {
    const began = performance.now();
    if (text.length > this.seen) {
      this.rest += text.slice(this.seen).replace(UNSEEN, "").replace(/[\u2028\u2029]/g, "\n");
      this.seen = text.length;
    }
    if (!isWhole && began < this.nextAt) return true;
    while (this.rest || this.code) {
      if (performance.now() - began > FRAME_MS) return true;
      if (!this.#step(isWhole)) break;
    }
    this.nextAt = performance.now() + WAIT_BY_COST * (performance.now() - began);
    return false;
  }

  // Finishes some of the rest; false where all that is left may still grow.
  #step(isWhole) {
    if (this.code) return this.#codeStep(isWhole);
    const fence = FENCE.exec(this.rest);
    if (fence) {
      this.#finish([]);
      const code = codeBox(fence[2].trim().split(/\s/)[0]), partial = document.createTextNode("");
      this.element.append(code.box);
      code.element.append(partial);
      this.code = {...code, partial, end: new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`)};
      this.rest = this.rest.slice(fence[0].length);
      return true;
    }
    if (!/^[^\n]*\|/.test(this.rest)) this.head = "";
    for (let size = PIECE; ; size *= 4) {
      const source = (this.head + this.rest).slice(0, size), isAll = source.length === this.head.length + this.rest.length;
      const found = pieces(source, isAll, isAll && isWhole);
      if (!found && size < LARGEST_BLOCK) continue;
      let {done, growing, head = ""} = found || {done: [plainToken(source)], growing: []};
      if (done.length > STEP_BLOCKS) { done = done.slice(0, STEP_BLOCKS); growing = []; }
      const length = done.reduce((sum, token) => sum + token.raw.length, 0);
      if (length) {
        this.#finish(done.map(token => block(token, this.head, true)));
        this.rest = this.rest.slice(length - this.head.length);
        this.head = head;
      }
      if (growing.length) this.#grow(growing.map(token => block(token, this.head, false)));
      return !growing.length && this.rest !== "";
    }
  }

  #finish(elements) {
    this.#grow([]);
    this.element.append(...elements.filter(Boolean));
  }

  #grow(elements) {
    for (const element of this.growing) element.remove();
    this.growing = elements.filter(Boolean);
    this.element.append(...this.growing);
  }

  // Lines of code, up to the closing fence. A last line that is not whole may become one.
  #codeStep(isWhole) {
    const {partial, element, end, language} = this.code;
    const whole = isWhole ? this.rest : this.rest.slice(0, this.rest.lastIndexOf("\n") + 1);
    const lines = whole.split("\n"), closing = lines.findIndex(line => end.test(line));
    const code = closing < 0 ? whole : lines.slice(0, closing).map(line => `${line}\n`).join("");
    if (code) partial.before(code);
    this.rest = this.rest.slice(closing < 0 ? whole.length : code.length + lines[closing].length + 1);
    const isOpen = closing < 0 && !isWhole;
    partial.data = isOpen && !/^ {0,3}[`~]/.test(this.rest) ? this.rest : "";
    if (isOpen) return false;
    highlight(element, language);
    this.code = null;
    return true;
  }
}

const plainToken = raw => ({type: "plain", raw});

// The blocks of `source` that are finished, and those that may grow; null where a longer piece is needed to tell. `isAll`:
// nothing is known to follow, `isLast`: nothing will.
function pieces(source, isAll, isLast) {
  let tokens;
  try { tokens = tokensOf(source); } catch {
    const end = isAll ? source.length : source.lastIndexOf("\n") + 1 || source.length, token = plainToken(source.slice(0, end));
    return isAll && !isLast ? {done: [], growing: [token]} : {done: [token], growing: []};
  }
  const code = tokens.findIndex(token => token.type === "code" && FENCE.test(token.raw));
  if (code > 0) return {done: tokens.slice(0, code), growing: []};
  if (isLast) return {done: tokens, growing: []};
  let last = tokens.length - 1;
  while (last > 0 && tokens[last].type === "space") last--;
  return last > 0 || isAll ? {done: tokens.slice(0, last), growing: isAll ? tokens.slice(last) : []} : cutBlock(tokens[0], source);
}

// Of one block that is too long, what stands before a place where it can be cut, so that what follows is a block of its
// own kind; null where there is none.
function cutBlock(token, source) {
  const at = {
    list: () => Math.max(...[...source.matchAll(/\n(?=[-*+] |\d{1,9}[.)] )/g)].map(match => match.index + 1), 0),
    table: () => source.lastIndexOf("\n") + 1,
    blockquote: () => source.lastIndexOf("\n>") + 1,
    paragraph: () => Math.max(source.lastIndexOf("\n"), source.lastIndexOf(" ")) + 1,
  }[token.type]?.() || 0;
  const head = token.type === "table" ? source.split("\n", 2).join("\n") + "\n" : "";
  if (at <= head.length) return null;
  try { return {done: tokensOf(source.slice(0, at)), growing: [], head}; } catch { return {done: [plainToken(source.slice(0, at))], growing: []}; }
}

function plain(text) {
  const element = document.createElement("p");
  element.className = "raw";
  element.dir = "auto";
  element.textContent = text;
  return element;
}

// A token as an element; null for one that shows nothing. `head`: of the table that it goes on with.
function block(token, head, isDone) {
  if (token.type === "space" || token.type === "def") return null;
  if (token.type === "plain") return plain(token.raw.slice(head.length));
  const box = document.createElement("div");
  try {
    box.append(DOMPurify.sanitize(markdown().parser([token]),
      {ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true}));
  } catch { return plain(token.raw); }
  for (const link of box.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
  for (const mark of box.querySelectorAll("input")) mark.setAttribute("aria-label", mark.checked ? "done" : "to do");
  for (const part of box.querySelectorAll(DIRECTED)) part.dir = "auto";
  for (const math of box.querySelectorAll(".math")) typeset(math);
  if (head) for (const thead of box.querySelectorAll("thead")) thead.hidden = true;
  for (const table of box.querySelectorAll("table")) scrolled(wrapped(table, "table"));
  for (const pre of box.querySelectorAll("pre")) {
    const code = codeBox(/language-(\S+)/.exec(pre.firstElementChild?.className || "")?.[1] || "");
    code.element.textContent = pre.textContent;
    pre.replaceWith(code.box);
    if (isDone) highlight(code.element, code.language);
  }
  return box;
}

// An empty box for code, with its language and a button to copy it.
function codeBox(language) {
  const box = document.createElement("div"), bar = document.createElement("div"), name = document.createElement("span");
  const pre = document.createElement("pre"), element = document.createElement("code"), button = document.createElement("button");
  box.className = "code";
  box.dir = "ltr";
  name.textContent = language;
  Object.assign(button, {type: "button", textContent: "Copy"});
  button.addEventListener("click", () => copy(element.textContent.replace(/\n$/, ""), button));
  bar.append(name, button);
  pre.append(element);
  box.append(bar, scrolled(pre));
  return {box, element, language};
}

// What may be wider than the window can be scrolled by the keyboard, too.
function scrolled(element) {
  element.tabIndex = 0;
  return element;
}

function wrapped(element, className) {
  const box = document.createElement("div");
  box.className = className;
  element.replaceWith(box);
  box.append(element);
  return box;
}
