// What is seen of a turn: the question, what the model thought, called and said, and what can be done with it.
import {boxOf} from "./attachments.js";
import {button, element, grows, words} from "./elements.js";
import {Answer, copy} from "./markdown.js";

const NEAR_END_PIXELS = 80, LONG_QUESTION = 1500, TICK_MS = 500;

export class TurnView {
  // `page` is what the view may ask for: isRunning(), log, hasTemplate(), branches(turn), and the actions regenerate, goOn,
  // ask, remove and show, all of a turn.
  constructor(turn, page) {
    this.turn = turn;
    this.page = page;
    this.run = null;  // of the answer that comes: {began}
    this.box = element("div", "turn");
    this.question = element("div", "message user");
    this.thoughts = element("details", "thoughts");
    this.thoughts.append(element("summary"), words("div", "", ""));
    this.answerBox = element("div", "message answer");
    this.answer = new Answer(this.answerBox);
    this.calls = element("div", "message calls");
    this.waiting = element("div", "message waiting");
    this.error = element("div", "message error");
    this.note = element("small");
    this.actions = element("div", "actions");
    this.box.append(this.question, this.thoughts, this.answerBox, this.calls, this.waiting, this.error, this.note, this.actions);
    this.showQuestion();
    this.update();
  }

  // The answer comes now, or goes on.
  begin() {
    this.answer.reset();
    this.run = {began: performance.now()};
    this.ticks = setInterval(() => this.showWaiting(), TICK_MS);
    this.update(true);
  }

  end() {
    clearInterval(this.ticks);
    this.run = null;
    this.update(true);
  }

  // At most once in a frame: tokens come faster than a screen shows them. `follow`: to the end, wherever the reader is.
  updateSoon() {
    this.frame ||= requestAnimationFrame(() => this.update());
  }

  update(follow = false) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const {log} = this.page;
    const atEnd = follow && this.box.isConnected && this.run || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PIXELS;
    const {thoughts, answer, calls, error, note} = this.turn;
    this.thoughts.hidden = !thoughts;
    const shown = this.thoughts.lastChild;
    if (shown.textContent.length > thoughts.length) shown.textContent = "";
    if (shown.textContent.length < thoughts.length) shown.append(thoughts.slice(shown.textContent.length));
    if (this.#showAnswer(answer)) this.updateSoon();
    this.calls.hidden = !calls.length;
    this.calls.replaceChildren(...calls.map(callBox));
    this.error.textContent = error;
    this.error.hidden = !error;
    this.note.textContent = note;
    this.showWaiting();
    this.showActions();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  // Whether something of it is left to do.
  #showAnswer(answer) {
    this.answerBox.hidden = !answer;
    if (this.page.hasTemplate()) return this.answer.update(answer, !this.run);
    this.answerBox.className = "message answer raw";
    this.answerBox.dir = "auto";
    this.answerBox.textContent = answer;
    return false;
  }

  // That something goes on, and for how long.
  showWaiting() {
    const {thoughts, answer, calls} = this.turn, thinks = this.run && thoughts && !answer && !calls.length;
    const seconds = this.run ? Math.floor((performance.now() - this.run.began) / 1000) : 0;
    this.thoughts.firstChild.textContent = thinks ? `thinking … ${seconds} s` : "thoughts";
    this.thoughts.classList.toggle("moving", Boolean(thinks));
    this.waiting.hidden = !this.run || Boolean(thoughts || answer || calls.length);
    this.waiting.textContent = `waiting for the first token … ${seconds} s`;
    this.answerBox.classList.toggle("moving", Boolean(this.run && answer));
  }

  showQuestion() {
    const {question, files} = this.turn, text = words("div", "text", question);
    this.question.replaceChildren(...files.map(boxOf), ...(question ? [text] : []));
    if (question.length <= LONG_QUESTION) return;
    text.classList.add("long");
    const more = button("Show all", () => { text.classList.remove("long"); more.remove(); });
    this.question.append(more);
  }

  // The question becomes a field to write in, where it stands.
  edit() {
    const field = Object.assign(element("textarea", "edited"), {value: this.turn.question, rows: 1, dir: "auto"});
    const send = button("Send", () => {
      if (field.value.trim() || this.turn.files.length) this.page.ask(this.turn, field.value.trim());
    });
    const cancel = () => { this.showQuestion(); this.actions.querySelector(".edit")?.focus(); }, row = element("div", "actions");
    field.setAttribute("aria-label", "The question");
    field.addEventListener("keydown", event => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      send.click();
    });
    send.className = "main";
    row.append(send, button("Cancel", cancel));
    this.question.replaceChildren(...this.turn.files.map(boxOf), field, row);
    grows(field);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  showActions() {
    const {turn, page} = this, others = page.branches(turn), busy = page.isRunning();
    const key = busy ? String(this.run !== null) : `${turn.id} ${others.length} ${Boolean(turn.answer)} ${turn.cut}`;
    if (this.actions.dataset.key === key) return;
    this.actions.dataset.key = key;
    this.actions.replaceChildren();
    if (this.run) return;
    const copies = turn.answer ? [button("Copy", event => copy(turn.answer, event.currentTarget))] : [];
    this.actions.append(...copies);
    if (busy) return;
    if (others.length > 1) this.actions.append(...this.#branchButtons(others));
    if (turn.cut && turn.answer) this.actions.append(button("Continue", () => page.goOn(turn)));
    const edit = button("Edit", () => this.edit());
    edit.className = "edit";
    this.actions.append(button(turn.answer ? "Regenerate" : "Try again", () => page.regenerate(turn)), edit,
      button("Delete", () => page.remove(turn)));
  }

  #branchButtons(others) {
    const at = others.indexOf(this.turn);
    const step = (label, name, to) => Object.assign(button(label, () => this.page.show(this.turn, others[to]), name), {disabled: !others[to]});
    return [step("‹", "The answer before", at - 1), element("span", "branch", `${at + 1}/${others.length}`),
      step("›", "The next answer", at + 1)];
  }
}

function callBox({name, arguments: given}) {
  const box = element("details", "call");
  box.open = true;
  box.append(words("summary", "", `calls ${name}`), words("pre", "", given));
  box.lastChild.tabIndex = 0;
  return box;
}
