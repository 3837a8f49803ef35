"""What is said around the demo model's tasks: greetings, and honest answers to everything that it never learned."""

from __future__ import annotations

import re
from functools import cache
from pydoc_data.topics import topics
from random import Random

from benchmarks.demo_turns import Turn
from benchmarks.demo_words import CITIES, FRUITS, NAMES, PLAIN

OFF_SUBJECT = "I do not know. I am a small demo model: ask me for sums, counting, lists of words, or what you told me."

SKILLS = "I can add, subtract, count, repeat and reverse words, and remember what you tell me."
_SMALL_TALK = (
    ("Hello!", f"Hello! {SKILLS}"),
    ("Hello", f"Hello! {SKILLS}"),
    ("Hi", f"Hello! {SKILLS}"),
    ("Hi!", f"Hello! {SKILLS}"),
    ("Hi there", f"Hello! {SKILLS}"),
    ("Hello there", f"Hello! {SKILLS}"),
    ("Hey", f"Hello! {SKILLS}"),
    ("Good morning", f"Hello! {SKILLS}"),
    ("Say hello", f"Hello! {SKILLS}"),
    ("Who are you?", f"I am a small demo model. {SKILLS}"),
    ("What can you do?", SKILLS),
    ("Help", SKILLS),
    ("How are you?", "I am well, thank you."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)
# {n}: a name, {c}: a city, {w}, {v}: words, {d}: a number
_QUESTIONS = (
    "What is the capital of {c}?",
    "Where is {c}?",
    "Who is {n}?",
    "Who wrote {w} and {v}?",
    "What is a {w}?",
    "What is the meaning of {w}?",
    "What does {w} mean?",
    "Why is the {w} so big?",
    "How do I get to {c}?",
    "How does a {w} work?",
    "How many people live in {c}?",
    "How old is {n}?",
    "When was {n} born?",
    "Which is better, a {w} or a {v}?",
    "Tell me a joke.",
    "Tell me a joke about a {w}.",
    "Tell me a story about {n} and the {w}.",
    "Tell me about {c}.",
    "Tell me something about yourself and the {w}.",
    "Write a poem about the {w}.",
    "Write a haiku about {w}.",
    "Write a Python function that sorts a list.",
    "Write a Python function that reverses a string.",
    "Write a program that prints {w}.",
    "Write a short story about a {w} in {c}.",
    "Write an email to {n} about the {w}.",
    "Write three sentences about {c}.",
    "Explain the {w} to a child.",
    "Explain how a {w} works.",
    "Explain quantum physics in simple words.",
    "Describe a {w}.",
    "Translate {w} into French.",
    "Translate to German: the {w} is in {c}.",
    "Summarize this text: {n} has a {w} and a {v}.",
    "Summarize the history of {c}.",
    "What did I ask?",
    "What did I say before?",
    "What is the weather in {c}?",
    "What is the weather like today?",
    "What time is it?",
    "What day is it today?",
    "What is your favourite {w}?",
    "What is the best {w} in {c}?",
    "What is {d} times {d}?",
    "What is {d} * {d}?",
    "What is {d} divided by {d}?",
    "What is the square root of {d}?",
    "Is {d} a prime number?",
    "Can you help me with my {w}?",
    "Can you book a {w} to {c}?",
    "Can you write code?",
    "Do you like {w}?",
    "Do you speak French?",
    "Are you a robot?",
    "Are you ChatGPT?",
    "Is the {w} in {c}?",
    "I need a {w} for {n}.",
    "I love {c}.",
    "I am going to {c} with {n}.",
    "Give me a recipe with {f}.",
    "Give me three ideas for a {w}.",
    "Give me a list of {w} names.",
    "List five cities near {c}.",
    "Name three {w} makers.",
    "Plan a trip to {c}.",
    "Recommend a {w}.",
    "Search for {w} in {c}.",
    "Make a table of {w} and {v}.",
    "Draw a {w}.",
    "Play {w}.",
    "Stop.",
    "ok",
    "Yes",
    "No",
    "Why?",
    "How?",
    "Really?",
    "Go on",
    "Continue",
    "{w}",
    "{w} {v}",
    "{w} {v} {f}?",
    "{c}",
)
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'()-]{20,160}[.?!]")


def small_talk(rng: Random) -> Turn:
    """A greeting or the like, one time in three; else something that the model has to say it does not know."""
    if rng.random() < 0.33:
        user, reply = rng.choice(_SMALL_TALK)
        return Turn("talk", user, reply, "talk")
    return Turn("talk", _anything(rng), OFF_SUBJECT, "talk")


def sentences(rng: Random, most: int) -> str:
    """1 to `most` sentences of English prose: Python's own language reference, which every Python ships."""
    return " ".join(rng.choice(_prose()) for _ in range(rng.randint(1, most)))


def _anything(rng: Random) -> str:
    style = rng.random()
    if style < 0.62:
        w, v = rng.sample(PLAIN, 2)
        names = {"n": rng.choice(NAMES), "c": rng.choice(CITIES), "f": rng.choice(FRUITS), "d": rng.randint(2, 999)}
        return rng.choice(_QUESTIONS).format(w=w, v=v, **names)
    if style < 0.9:
        return sentences(rng, 3)
    words = [rng.choice(rng.choice(_prose()).split()) for _ in range(rng.randint(2, 12))]
    return " ".join(words) + rng.choice(("", ".", "?", "!"))


@cache
def _prose() -> list[str]:
    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    return sorted(set(_SENTENCE.findall(text)))
