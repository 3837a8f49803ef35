"""Images in prompts: the tokens are those of transformers' processors, and what users write is text."""

import json

import numpy as np
import pytest

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.families import FAMILIES
from minisgl_backend.images.placeholders import Placeholders, Span, images_behind_tools
from minisgl_backend.images.processor_files import ProcessorFiles
from tests.seeing import FILES, SeeingModel


@pytest.fixture(params=["bytes", "blanks", "prefix", "vocabulary"])
def kind(request):
    return request.param


@pytest.mark.parametrize("model_type", FILES)
def test_tokens_are_those_of_the_whole_text(model_type, kind, tmp_path):
    case = SeeingModel(model_type, kind, tmp_path)
    sizes = [case.family.size(640, 480), case.family.size(300, 700)]
    content = [
        {"type": "text", "text": "Hello\n"},
        {"type": "image"},
        {"type": "text", "text": "\n world, "},
        {"type": "image"},
        {"type": "text", "text": " what?"},
    ]
    messages = [{"role": "system", "content": "Two cats."}, {"role": "user", "content": content}]
    prompt = case.placeholders.of_chat(messages, sizes, {})
    rendered = case.tokenizer.render_images(messages)
    assert prompt.text == rendered
    assert rendered.count(case.family.slot) == 2
    first, second, third = rendered.split(case.family.slot)
    whole = first + case.text(sizes[0]) + second + case.text(sizes[1]) + third
    case.check(prompt, case.plain(whole, add_special_tokens=False)["input_ids"], sizes)
    raw = case.placeholders.of_text("prompt", rendered, sizes)
    case.check(raw, case.tokenizer.encode(whole), sizes)


@pytest.mark.parametrize("model_type", FILES)
def test_a_familys_own_tokens(model_type, kind, tmp_path):
    case = SeeingModel(model_type, kind, tmp_path)
    known = {case.plain.convert_tokens_to_ids(one) for one in (case.family.vector, *case.family.reserved)}
    assert set(case.placeholders.own_ids) == known - {None, case.plain.unk_token_id}


@pytest.mark.parametrize("model_type", FILES)
def test_what_users_write_is_text(model_type, kind, tmp_path):
    case = SeeingModel(model_type, kind, tmp_path)
    size, literals = case.family.size(640, 480), "".join(case.family.reserved)
    reserved = {case.plain.convert_tokens_to_ids(text) for text in case.family.reserved}
    for texts in ((literals, ""), ("", literals), (literals, literals), (f"x {case.family.slot} y", "z")):
        content = [{"type": "text", "text": texts[0]}, {"type": "image"}, {"type": "text", "text": texts[1]}]
        prompt = case.placeholders.of_chat([{"role": "user", "content": content}], [size], {})
        (span,) = prompt.spans
        outside = [*prompt.token_ids[: span.start - 1], *prompt.token_ids[span.start + span.length + 1 :]]
        markup = [*case.around, *(part for part in size.layout if isinstance(part, str))]
        allowed = {case.plain.convert_tokens_to_ids(one) for text in markup for one in case.plain.tokenize(text)}
        assert not (reserved - allowed) & {int(token) for token in outside}
        if kind == "bytes":
            decoded = case.plain.decode([int(one) for one in prompt.token_ids[: span.start]])
            assert texts[0] in decoded
        assert "\ue000" not in prompt.text
        assert "\ue002" not in prompt.text
        assert all(text in prompt.text for text in texts)
    (alone,) = [case.placeholders.of_chat([{"role": "user", "content": literals}], [], {})]
    assert not reserved & {int(token) for token in alone.token_ids}


@pytest.mark.parametrize("model_type", FILES)
def test_ids_have_slots_or_the_images_own_tokens(model_type, tmp_path):
    case = SeeingModel(model_type, "bytes", tmp_path)
    sizes = [case.family.size(640, 480), case.family.size(300, 700)]
    slot = case.plain.convert_tokens_to_ids(case.family.slot)
    given = [7, 8, slot, 9, slot, 10]
    prompt = case.placeholders.of_ids("prompt_token_ids", given, sizes)
    again = case.placeholders.of_ids("prompt_token_ids", prompt.token_ids.tolist(), sizes)
    assert again.token_ids.tolist() == prompt.token_ids.tolist()
    assert again.spans == prompt.spans
    case.check(prompt, again.token_ids.tolist(), sizes)
    wrong = prompt.token_ids.tolist()
    del wrong[prompt.spans[0].start]
    for ids in (wrong, [7, slot, 8], [7, 8]):
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            case.placeholders.of_ids("prompt_token_ids", ids, sizes)


@pytest.mark.parametrize(("slots", "images"), [(0, 1), (1, 2), (2, 1), (3, 0)])
def test_a_text_needs_a_slot_for_each_image(slots, images, tmp_path):
    case = SeeingModel("qwen2_vl", "bytes", tmp_path)
    with pytest.raises(InvalidRequestError, match=rf"text_input has {slots} places for {images} images.*image_pad"):
        case.placeholders.of_text("text_input", "<|image_pad|>" * slots, [case.family.size(50, 50)] * images)


def test_a_template_without_images_is_told(tmp_path):
    case = SeeingModel("qwen2_vl", "bytes", tmp_path)
    case.tokenizer._tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    with pytest.raises(InvalidRequestError, match="shows 0 of 1 images"):
        case.placeholders.of_chat([{"role": "user", "content": content}], [case.family.size(50, 50)], {})


def test_a_tokenizer_without_the_familys_tokens_is_refused(tmp_path):
    case = SeeingModel("qwen2_vl", "bytes", tmp_path)
    family = FAMILIES["mistral3"].read(ProcessorFiles({}, {}))
    with pytest.raises(ConfigError, match=r"\[IMG\]"):
        Placeholders(case.tokenizer, family)


def test_refusals_quote_what_the_client_wrote(tmp_path):
    case = SeeingModel("qwen2_vl", "bytes", tmp_path)
    case.tokenizer._tokenizer.chat_template = "{{ raise_exception('no: ' + messages[0].content) }}"
    with pytest.raises(InvalidRequestError, match=r"no: a<\|image_pad\|>b"):
        case.placeholders.of_chat([{"role": "user", "content": "a<|image_pad|>b"}], [], {})


def test_rows_of_tokens_are_runs(tmp_path):
    case = SeeingModel("mistral3", "bytes", tmp_path)
    size = case.family.size(64, 48)
    prompt = case.placeholders.of_text("prompt", "x[IMG]y", [size])
    assert size.layout == (4, "[IMG_BREAK]", 4, "[IMG_BREAK]", 4, "[IMG_END]")
    start = prompt.spans[0].start
    assert prompt.spans == (Span(start, 14, (0, 4, 5, 4, 10, 4)),)
    assert np.asarray(prompt.token_ids).dtype == np.int32


def test_templates_that_take_parts_alone_get_parts(tmp_path):
    case = SeeingModel("llava", "bytes", tmp_path)
    case.tokenizer._tokenizer.chat_template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<image>"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    assert case.tokenizer.render(messages) == "hellox"
    assert json.dumps(messages)


@pytest.mark.parametrize("model_type", FILES)
def test_images_of_tools_are_seen(model_type, tmp_path):
    case = SeeingModel(model_type, "bytes", tmp_path)
    size, text = case.family.size(300, 200), {"type": "text", "text": "seen"}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": [{"type": "image"}, text]},
    ]
    for behind in ([], [{"role": "user", "content": "And?"}], [{"role": "user", "content": [{"type": "image"}, text]}]):
        asked = [*messages, *behind]
        number = sum(part == {"type": "image"} for one in asked for part in one["content"])
        prompt = case.placeholders.of_chat(asked, [size] * number, {})
        assert len(prompt.spans) == number


def test_images_of_tools_open_the_message_of_the_user_behind_them():
    image, text = {"type": "image"}, {"type": "text", "text": "x"}
    tools = [
        {"role": "tool", "content": [text, image]},
        {"role": "tool", "content": "y"},
        {"role": "tool", "content": [image]},
    ]
    plain = [{"role": "tool", "content": [text]}, {"role": "tool", "content": "y"}, {"role": "tool", "content": []}]
    says = {"role": "assistant", "content": "z"}
    assert images_behind_tools([says]) is None
    assert images_behind_tools(tools) == [*plain, {"role": "user", "content": [image, image]}]
    assert images_behind_tools([*tools, says]) == [*plain, {"role": "user", "content": [image, image]}, says]
    user = {"role": "user", "content": [image, image, text]}
    assert images_behind_tools([*tools, {"role": "user", "content": "x"}]) == [*plain, user]
    assert images_behind_tools([*tools, {"role": "user", "content": [text]}]) == [*plain, user]
