// Markdown that a model writes, as elements. HTML in it is shown as text; what the parser makes of the rest goes
// through DOMPurify before it becomes elements, and the page's policy lets no script but its own run.
const escape = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);
const TAGS = ["p", "br", "hr", "em", "strong", "del", "a", "code", "pre", "blockquote", "ul", "ol", "li", "input", "span",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"];
const ATTRIBUTES = ["href", "title", "align", "start", "class", "type", "checked", "disabled"];
let parser = null;

// Made at the first answer: the libraries are there by then.
function markdown() {
  parser ??= new marked.Marked({gfm: true, breaks: true, renderer: {
    html({text, block}) {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";  // the usual line break in a table's cell
      return block ? `<p class="raw">${escape(text)}</p>` : escape(text);
    },
    image({href, text}) { return `<a href="${escape(href)}">${escape(text || href)}</a>`; },  // none is fetched
  }});
  return parser;
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

// An element that shows a growing text. Blocks that have not changed stay as they are.
export class Answer {
  constructor(element) {
    this.element = element;
    this.blocks = [];
  }

  update(text) {
    const tokens = markdown().lexer(text).filter(token => token.type !== "space");
    tokens.forEach((token, index) => {
      if (this.blocks[index] === token.raw) return;
      const block = this.#block(token);
      if (index < this.blocks.length) this.element.children[index].replaceWith(block);
      else this.element.append(block);
      this.blocks[index] = token.raw;
    });
    while (this.blocks.length > tokens.length) {
      this.element.lastElementChild.remove();
      this.blocks.pop();
    }
  }

  #block(token) {
    const block = document.createElement("div");
    block.append(DOMPurify.sanitize(markdown().parser([token]),
      {ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true}));
    for (const link of block.querySelectorAll("a")) Object.assign(link, {target: "_blank", rel: "noopener noreferrer"});
    for (const table of block.querySelectorAll("table")) wrapped(table, "table");
    for (const pre of block.querySelectorAll("pre")) {
      const bar = document.createElement("div"), name = document.createElement("span"), button = document.createElement("button");
      name.textContent = /language-(\S+)/.exec(pre.firstElementChild?.className || "")?.[1] || "";
      Object.assign(button, {type: "button", textContent: "Copy"});
      button.addEventListener("click", () => copy(pre.textContent.replace(/\n$/, ""), button));
      bar.append(name, button);
      wrapped(pre, "code").prepend(bar);
    }
    return block;
  }
}

function wrapped(element, className) {
  const box = document.createElement("div");
  box.className = className;
  element.replaceWith(box);
  box.append(element);
  return box;
}
