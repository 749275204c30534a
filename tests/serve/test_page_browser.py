"""The chat page in real headless Chromium, against a server whose answers each test lines up."""

from __future__ import annotations

import json
import re
import threading

import browser
import pytest
from page_server import USAGE, PageServer, Reply, calls, says

pytestmark = [
    pytest.mark.skipif(browser.BINARY is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def chromium():
    with browser.Chromium() as started:
        yield started


@pytest.fixture
def server():
    made = PageServer()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def page(chromium, server):
    """The page of that server, which must have had no trouble in the end: no exception, nothing refused."""
    opened = chromium.page(server.url)
    opened.until("document.querySelector('#model').options.length")
    yield opened
    found = [one for one in opened.problems() if not re.search(r"status of (4\d\d|503)|ERR_", one)]
    opened.close()
    assert found == []


def say(page, text):
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")


def ended(page, count):
    """Wait until there are so many turns and no answer is under way."""
    page.until(f"document.querySelectorAll('.turn').length == {count} && document.querySelector('#stop').hidden")


def texts(page, selector):
    return page.run(f"Array.from(document.querySelectorAll({selector!r}), (one) => one.innerText.trim())")


def press_button(page, turn, name):
    """A button under a turn, counted from 0."""
    page.run(
        f"Array.from(document.querySelectorAll('.turn')[{turn}].querySelectorAll('.foot button'))"
        f".find((one) => one.textContent === {name!r}).click()"
    )


def setting(page, name, value):
    """As if typed into the dialog."""
    page.run(
        f"(() => {{ const field = document.querySelector('#settings form').elements[{name!r}];"
        f" field.value = {json.dumps(value)};"
        " for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true})) })()"
    )


# ---------------------------------------------------------------------- an answer


def test_an_answer_is_shown_as_it_comes(page, server):
    pause = threading.Event()
    thought, answer = says("", "Let me see.")[:-1], says("First paragraph.\n\nSecond **one**.")
    server.replies = [Reply([*thought, *answer[:5], pause, *answer[5:]])]
    say(page, "Hello\n<b>you</b>")
    page.until("document.querySelectorAll('.turn.assistant .body p').length == 2")
    assert page.run("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    assert page.run("document.querySelector('#log').getAttribute('aria-busy')") == "true"
    # A screen reader hears the paragraph that is complete, and not the one that grows.
    assert texts(page, "#said p") == ["First paragraph."]
    pause.set()
    ended(page, 2)
    assert texts(page, ".turn.user .body") == ["Hello\n<b>you</b>"]
    assert texts(page, ".turn.assistant .body p") == ["First paragraph.", "Second one."]
    assert texts(page, "#said p") == ["First paragraph.", "Second one."]
    assert page.run("document.activeElement.id") == "prompt"
    request = server.requests[0]
    assert request["messages"] == [{"role": "user", "content": "Hello\n<b>you</b>"}]
    assert request["stream"] is True and request["thinking"] == {"type": "enabled", "effort": "max"}


def test_badges_tell_of_the_cache_and_of_speed(page, server):
    pause = threading.Event()
    server.replies = [Reply([*says("One.", "Hm.")[:-1], pause, *says("more")])]
    say(page, "Hello")
    page.until("document.querySelector('.turn.assistant .body p')")
    threading.Timer(0.2, pause.set).start()
    ended(page, 2)
    said = " ".join(texts(page, ".badge"))
    assert "1,024 of 1,234 cached" in said and "56 tokens" in said and "first token 0." in said
    rate = float(re.search(r"([\d.,]+) tokens/s", said)[1].replace(",", ""))
    assert 0 < rate < (USAGE.completion - 1) / 0.15


def test_reasoning_is_folded_and_goes_back_with_the_next_message(page, server):
    server.replies = [Reply(says("Four.", "Two and two."))] + [Reply(says("So it is."))] * 2
    say(page, "2 + 2?")
    ended(page, 2)
    assert page.run("document.querySelector('.thought').open") is False
    assert page.run("document.querySelector('.thought summary').innerText").startswith("Thought for")
    page.click(".thought summary")
    assert texts(page, ".thought .text") == ["Two and two."]
    say(page, "Sure?")
    ended(page, 4)
    assert page.run("document.querySelector('.thought').open") is True
    sent = server.requests[1]["messages"][1]
    assert sent == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    say(page, "Really?")
    ended(page, 6)
    # Nothing was thought: an empty thought, which is another thing than none.
    assert server.requests[2]["messages"][3] == {"role": "assistant", "content": "So it is.", "reasoning_content": ""}


def test_escape_stops_and_what_came_can_be_continued(page, server):
    server.replies = [Reply([*says("Once upon a")[:-1], threading.Event()]), Reply(says(" time."))]
    say(page, "A story")
    page.until("document.querySelector('.turn.assistant .body').innerText.includes('upon a')")
    page.press("Escape")
    ended(page, 2)
    assert server.gone.wait(10), "the connection stays open"
    assert "stopped by you" in texts(page, ".badge") and texts(page, "#failure") == [""]
    press_button(page, 1, "Continue")
    page.until("document.querySelector('.turn.assistant .body').innerText.includes('upon a time.')")
    ended(page, 2)
    assert server.requests[1]["messages"][-1]["partial"] is True
    assert server.requests[1]["messages"][-1]["content"] == "Once upon a"
    assert "stopped by you" not in texts(page, ".badge")


def test_stopped_before_anything_came_leaves_no_turn(page, server):
    server.replies = [Reply([threading.Event()])]
    say(page, "Hello")
    page.until("!document.querySelector('#stop').hidden")
    page.click("#stop")
    ended(page, 1)


# ---------------------------------------------------------------------- text of a model is text

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

[one](javascript:window.hacked=1) [two](data:text/html,<script>1</script>) [three](https://example.org/a?b=1)

```html" onload="window.hacked = 1
</code></pre><script>window.hacked = 1</script>
```

- <svg onload=window.hacked=1> `<b>` **<i onclick=1>x</i>**
"""


def test_what_a_model_says_cannot_run_or_bring_elements(page, server):
    thought = "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>"
    server.replies = [Reply(says(HOSTILE, thought)), Reply(calls(("x_0", "<img src=x>", '{"<b>": "<script>"}')))]
    say(page, "Go on")
    ended(page, 2)
    say(page, "<script>window.hacked = 1</script>")
    ended(page, 4)
    assert page.run("typeof window.hacked") == "undefined"
    assert page.run("document.querySelectorAll('#turns :is(script, img, svg, iframe, b, i)').length") == 0
    assert page.run("Array.from(document.querySelectorAll('#turns a'), (a) => [a.href, a.rel])") == [
        ["https://example.org/a?b=1", "noopener noreferrer"]
    ]
    handlers = "Array.from(document.querySelectorAll('#turns *')).flatMap((one) => one.getAttributeNames())"
    assert not [name for name in page.run(handlers) if name.startswith("on")]
    assert "<script>window.hacked = 1</script>" in texts(page, ".turn.assistant .body")[0]


def test_the_policy_would_stop_a_script_that_got_in(page):
    """The second lock, tried alone: text as markup is refused, and so is a style inside the page."""
    assert (
        page.run("(() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } })()")
        == "TypeError"
    )
    page.run("(() => { const s = document.createElement('style'); s.textContent = 'body {display: none}';"
             " document.head.append(s) })()")  # fmt: skip
    assert page.run("getComputedStyle(document.body).display") == "grid"
    assert len([one for one in page.problems() if "style" in one]) == 1
    page.browser.events.clear()


MARKUP = {
    "a **b** *c* `d <e>`": "<p>a <strong>b</strong> <em>c</em> <code>d &lt;e&gt;</code></p>",
    "snake_case_name 5 * 3 * 2 **open": "<p>snake_case_name 5 * 3 * 2 **open</p>",
    "# One #\ntext": "<h3>One</h3><p>text</p>",
    "- a\n- b\n  - c\n\n  more\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d</li></ul>",
    "3. a\n4. b\n\nafter": '<ol start="3"><li>a</li><li>b</li></ol><p>after</p>',
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "| a | **b** |\n|:--|---|\n| 1 | 2 | 3 |\n| `x` |\nafter": '<div class="table" tabindex="0" aria-label="Table" '
    'role="region"><table><thead><tr><th>a</th><th><strong>b</strong></th></tr></thead><tbody><tr><td>1</td><td>2</td>'
    "</tr><tr><td><code>x</code></td></tr></tbody></table></div><p>after</p>",
    "a | b\nc": "<p>a | b\nc</p>",
    "**bold _both_** x": "<p><strong>bold <em>both</em></strong> x</p>",
}


@pytest.mark.parametrize("text", MARKUP)
def test_markup(page, text):
    html = page.run(
        "import('/page/markup.js').then(({show}) => { const node = document.createElement('div');"
        f" show(node, {json.dumps(text)}); return node.innerHTML }})"
    )
    assert html == MARKUP[text]


def test_any_split_of_a_text_gives_the_same_markup(page):
    """What a stream built step by step is what the whole would have been."""
    text = "\n".join([*MARKUP, "```py\nx = 1\n```\nhttps://example.org/a_b. [l](https://example.org/(x))", HOSTILE])
    same = page.run(
        "import('/page/markup.js').then(({show}) => {"
        f" const text = {json.dumps(text)}, [grown, whole] = [0, 1].map(() => document.createElement('div'));"
        " for (let end = 0; end < text.length; end += 7) show(grown, text.slice(0, end));"
        " show(grown, text); show(whole, text); return grown.innerHTML === whole.innerHTML && whole.innerHTML.length })"
    )
    assert same > 500


@pytest.mark.parametrize(
    "piece", ["`", "*a", "[a](http://", "> ", "  - x\n", "~", "# ", "_", "http://)))", "**_`", " ", "|", "|-\n"]
)
def test_no_text_makes_the_page_slow(page, piece):
    """A scan that went back for each character would need hours for these, and the browser's answer be missed."""
    page.run(
        "import('/page/markup.js').then(({show}) =>"
        f" show(document.createElement('div'), {json.dumps(piece)}.repeat(60000) + '`x'))"
    )


# ---------------------------------------------------------------------- tools

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_a_user_gives_the_results_of_calls(page, server):
    asked = calls(("weather_0", "weather", '{"city": "Oslo"}'), ("weather_1", "weather", '{"city": "Bergen"}'))
    server.replies = [Reply(asked), Reply(says("4 and 6 degrees."))]
    page.click("#open-settings")
    setting(page, "tools", json.dumps(TOOLS))
    setting(page, "tool_choice", "required")
    page.click("#settings .main")
    say(page, "Weather?")
    page.until("document.querySelectorAll('.results textarea').length == 2")
    assert server.requests[0]["tools"] == TOOLS and server.requests[0]["tool_choice"] == "required"
    assert '"city": "Oslo"' in texts(page, ".call pre")[0]
    page.run("document.querySelectorAll('.results textarea')[0].focus()")
    page.type("4")
    page.press("Tab")
    page.press("Tab")  # past the copy button of the second call
    page.press("Tab")
    page.type('{"degrees": 6}')
    page.click(".results .main")
    ended(page, 5)
    messages = server.requests[1]["messages"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["weather_0", "weather_1"]
    assert messages[1]["tool_calls"][1]["function"] == {"name": "weather", "arguments": '{"city": "Bergen"}'}
    assert messages[1]["content"] is None
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "weather_0", "name": "weather", "content": "4"},
        {"role": "tool", "tool_call_id": "weather_1", "name": "weather", "content": '{"degrees": 6}'},
    ]
    assert page.run("document.querySelectorAll('.results').length") == 0


def test_a_wrong_declaration_is_not_taken_over(page, server):
    server.replies = [Reply(says("Yes."))]
    page.click("#open-settings")
    setting(page, "tools", '{"name": ')
    assert "This is no JSON" in texts(page, "#tools-wrong")[0]
    page.click("#settings .main")
    assert page.run("document.querySelector('#settings').open") is True
    page.press("Escape")
    page.until("!document.querySelector('#settings').open")
    say(page, "Hello")
    ended(page, 2)
    assert "tools" not in server.requests[0]


def test_a_call_that_broke_off_is_not_sent_back(page, server):
    broken = calls(("weather_0", "weather", '{"city": "Oslo"}'))[:-2]
    server.replies = [Reply([*says("Let me")[:-1], *broken], ends=False), Reply(says("Well."))]
    say(page, "Weather?")
    page.until("document.querySelector('#failure p')")
    assert page.run("document.querySelectorAll('.call').length") == 0
    say(page, "And?")
    ended(page, 4)
    assert "tool_calls" not in server.requests[1]["messages"][1]


# ---------------------------------------------------------------------- settings


def test_settings_go_into_the_request(page, server):
    server.replies = [Reply(says("Yes."))] * 2
    page.click("#open-settings")
    numbers = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 77, "seed": 3}
    for name, value in {**numbers, "system": "Be brief."}.items():
        setting(page, name, value)
    setting(page, "temperature", 7)  # refused by the field; 0.5 stays
    setting(page, "temperature", 0.5)
    page.click("#settings .main")
    page.run("(() => { const e = document.querySelector('#effort'); e.value = 'off';"
             " e.dispatchEvent(new Event('change')) })()")  # fmt: skip
    say(page, "Hello")
    ended(page, 2)
    request = server.requests[0]
    assert {name: request[name] for name in numbers} == numbers
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert request["thinking"] == {"type": "disabled"}
    assert "reasoning_content" not in page.run("JSON.stringify({...localStorage})")
    # A new conversation begins with the settings of the last.
    page.press("k", browser.CONTROL)
    ended(page, 0)
    say(page, "Again")
    ended(page, 2)
    assert server.requests[1]["seed"] == 3 and len(server.requests[1]["messages"]) == 2


def test_shift_enter_begins_a_line(page, server):
    page.run("document.querySelector('#prompt').focus()")
    page.type("a")
    page.press("Enter", browser.SHIFT)
    page.type("b")
    assert page.run("document.querySelector('#prompt').value") == "a\nb"
    assert server.requests == []


# ---------------------------------------------------------------------- errors


def test_a_key_is_asked_for_and_sent(chromium, server):
    server.key = "secret"
    page = chromium.page(server.url)
    page.until("document.querySelector('#failure p')")
    assert texts(page, "#failure p") == ["the API key is wrong or missing"]
    page.click("#failure button")
    assert page.run("document.activeElement.name") == "key"
    setting(page, "key", "secret")
    page.click("#settings .main")
    page.until("!document.querySelector('#failure p') && document.querySelector('#model').value == 'tiny'")
    server.replies = [Reply(says("Yes."))]
    say(page, "Hello")
    ended(page, 2)
    assert server.keys == ["Bearer secret"]
    assert "secret" not in page.run("JSON.stringify({...localStorage})")
    page.close()


def test_a_busy_server_is_asked_again(page, server):
    server.replies = [Reply(status=429, error="8 requests are waiting.", headers={"Retry-After": "1"})]
    server.replies += [Reply(says("Now."))]
    say(page, "Hello")
    page.until("document.querySelector('.turn.assistant .foot').innerText.includes('Trying again in 1 s')")
    page.until("document.querySelector('.turn.assistant .body').innerText == 'Now.'")
    assert len(server.requests) == 2


def test_waiting_for_a_busy_server_can_be_stopped(page, server):
    server.replies = [Reply(status=429, error="Full.", headers={"Retry-After": "60"})]
    say(page, "Hello")
    page.until("document.querySelector('.turn.assistant .foot').innerText.includes('Trying again')")
    page.press("Escape")
    ended(page, 1)
    assert len(server.requests) == 1


def test_a_refusal_is_shown_and_can_be_tried_again(page, server):
    words = "temperature is 3; allowed: <a number> from 0 to 2"
    server.replies = [
        Reply(status=400, error=words),
        Reply([*says("Par")[:-1]], error="it broke"),
        Reply(says("Fine.")),
    ]
    say(page, "Hello")
    page.until("document.querySelector('#failure p')")
    assert texts(page, "#failure p") == [words] and page.run("document.querySelectorAll('.turn').length") == 1
    page.click("#failure button")
    page.until("document.querySelector('#failure p')?.innerText == 'it broke'")
    assert texts(page, ".turn.assistant .body") == ["Par"]
    page.click("#failure button")
    page.until("document.querySelector('.turn.assistant .body').innerText == 'Fine.'")
    assert page.run("document.querySelector('#failure').children.length") == 0


def test_what_came_before_the_connection_was_lost_is_kept(page, server):
    server.replies = [Reply(says("Half an ans", "Thinking.")[:-1], ends=False)]
    say(page, "Hello")
    page.until("document.querySelector('#failure p')")
    assert "connection was lost" in texts(page, "#failure p")[0]
    page.goto(server.url)
    page.until("document.querySelector('.turn.assistant')")
    assert texts(page, ".turn.assistant .body") == ["Half an ans"] and "connection lost" in texts(page, ".badge")


def test_a_server_that_is_gone(page, server):
    server.shutdown()
    server.server_close()
    say(page, "Hello")
    page.until("document.querySelector('#failure p')")
    assert texts(page, "#failure p") == ["The server cannot be reached."]
    assert page.run("document.querySelectorAll('.turn').length") == 1


# ---------------------------------------------------------------------- branches


def test_an_edit_cuts_a_branch_and_undo_brings_it_back(page, server):
    server.replies = [Reply(says(text)) for text in ("One.", "Two.", "Three.")]
    say(page, "first")
    ended(page, 2)
    say(page, "second")
    ended(page, 4)
    press_button(page, 0, "Edit")
    assert page.run("document.activeElement.value") == "first"
    page.run("document.activeElement.select()")
    page.type("other")
    page.click(".edit .main")
    page.until("document.querySelector('.turn.assistant .body')?.innerText == 'Three.'")
    assert [m["content"] for m in server.requests[2]["messages"]] == ["other"]
    page.click("#undo")
    assert texts(page, ".turn .body") == ["first", "One.", "second", "Two."]
    page.click("#notice button")  # redo
    assert texts(page, ".turn .body") == ["other", "Three."]
    page.click("#undo")
    assert texts(page, ".turn .body") == ["first", "One.", "second", "Two."]
    page.goto(server.url)
    page.until("document.querySelectorAll('.turn').length == 4")


def test_an_answer_can_be_asked_for_again(page, server):
    server.replies = [Reply(says("One.")), Reply(says("Other."))]
    say(page, "first")
    ended(page, 2)
    press_button(page, 1, "Again")
    page.until("document.querySelector('.turn.assistant .body').innerText == 'Other.'")
    ended(page, 2)
    assert server.requests[0] == server.requests[1]
    page.click("#undo")
    assert texts(page, ".turn .body") == ["first", "One."]


def test_an_edit_while_an_answer_comes_stops_that_one(page, server):
    server.replies = [Reply([*says("Long")[:-1], threading.Event()]), Reply(says("Short."))]
    say(page, "first")
    page.until("document.querySelector('.turn.assistant .body').innerText == 'Long'")
    press_button(page, 0, "Edit")
    page.type(" or not")
    page.click(".edit .main")
    page.until("document.querySelector('.turn.assistant .body')?.innerText == 'Short.'")
    ended(page, 2)
    assert server.gone.wait(10)


# ---------------------------------------------------------------------- conversations


def test_conversations_are_kept_switched_deleted_and_exported(page, server):
    pause = threading.Event()
    server.replies = [Reply([*says("Slow ")[:-1], pause, *says("answer.")]), Reply(says("Quick."))]
    say(page, "one")
    page.until("document.querySelector('.turn.assistant .body').innerText.includes('Slow')")
    page.press("k", browser.CONTROL)
    say(page, "two")
    ended(page, 2)
    assert texts(page, "#conversations .open") == ["two", "one"]
    pause.set()  # the first goes on while the second is shown
    page.until("JSON.stringify({...localStorage}).includes('Slow answer.')")
    page.run("document.querySelectorAll('#conversations .open')[1].click()")
    assert texts(page, ".turn .body") == ["one", "Slow answer."]
    page.run("document.querySelectorAll('#conversations .delete')[1].click()")
    assert texts(page, ".turn .body") == ["two", "Quick."]
    page.click("#undo")
    assert texts(page, ".turn .body") == ["one", "Slow answer."]
    page.run("(() => { const make = URL.createObjectURL; URL.createObjectURL = (b) => make(window.exported = b) })()")
    page.click("#export")
    whole = json.loads(page.run("window.exported.text()"))
    assert [m["content"] for m in whole["messages"]] == ["one", "Slow answer."] and whole["model"] == "tiny"
    page.goto(server.url)
    page.until("document.querySelectorAll('#conversations li').length == 2")


def test_a_full_store_is_told(page, server):
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }")
    server.replies = [Reply(says("Yes."))]
    say(page, "Hello")
    ended(page, 2)
    assert "no room" in texts(page, "#notice span")[0]


def test_a_damaged_record_is_passed_over(page, server):
    page.run("localStorage.setItem('nanok3.conversation.x', '{\"turns\": 3')")
    page.goto(server.url)
    page.until("document.querySelector('#model').options.length")


# ---------------------------------------------------------------------- pictures

PASTE = """new Promise((done) => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 40, height: 30});
  canvas.getContext('2d').fillRect(0, 0, 9, 9);
  canvas.toBlob((blob) => {
    const data = new DataTransfer();
    data.items.add(new File([blob], 'a.png', {type: 'image/png'}));
    data.items.add(new File(['no picture'], 'b.png', {type: 'image/png'}));
    document.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data}));
    done();
  });
})"""


def test_a_picture_is_pasted_where_the_model_sees(chromium, server):
    server.model = {"id": "seer", "supports_image_in": True}
    page = chromium.page(server.url)
    page.until("!document.querySelector('#attach').hidden")
    page.run(PASTE)
    page.until("document.querySelector('#pictures img')?.naturalWidth == 40")
    assert "b.png" in texts(page, "#notice span")[0]
    server.replies = [Reply(says("A square."))]
    say(page, "What is it?")
    ended(page, 2)
    image, text = server.requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,") and text["text"] == "What is it?"
    assert page.run("document.querySelector('.turn.user img').naturalWidth") == 40
    assert page.run("document.querySelectorAll('#pictures img').length") == 0
    page.close()


DROP = """new Promise((done) => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 60, height: 30});
  canvas.toBlob((blob) => {
    const data = new DataTransfer();
    for (let k = 1; k <= 11; k += 1) data.items.add(new File([blob], `d${k}.webp`, {type: 'image/webp'}));
    const large = new File(['x'], 'large.png', {type: 'image/png'});
    Object.defineProperty(large, 'size', {value: 60e6});
    data.items.add(large);
    document.dispatchEvent(new DragEvent('dragover', {dataTransfer: data, cancelable: true}));
    const shown = document.querySelector('#composer').classList.contains('drop');
    Object.defineProperty(data, 'files', {value: [...data.files].slice(0, 11).concat(large)});
    document.dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true}));
    done(shown);
  }, 'image/webp');
})"""


def test_pictures_are_dropped_limited_and_taken_back(chromium, server):
    server.model = {"id": "seer", "supports_image_in": True}
    page = chromium.page(server.url)
    page.until("!document.querySelector('#attach').hidden")
    assert page.run(DROP), "the field shows where they go"
    page.until("document.querySelectorAll('#pictures img').length == 10")
    (said,) = texts(page, "#notice span")
    assert "large.png has 60 MB; a picture may have 50 MB" in said and "at most 10 pictures" in said
    assert page.run("document.querySelector('#pictures img').alt") == "Picture 1, d1.webp"
    assert page.run("document.querySelector('#pictures button').ariaLabel") == "Remove picture 1, d1.webp"
    for _ in range(9):
        page.click("#pictures button")
    assert page.run("document.activeElement.id") == "prompt"
    server.replies = [Reply(says("A line."))]
    page.press("Enter")  # a picture is enough
    ended(page, 2)
    (part,) = server.requests[0]["messages"][0]["content"]
    url = part.pop("image_url")["url"]
    assert part == {"type": "image_url"} and url.startswith("data:image/png;base64,"), (
        "a still picture, without its name"
    )
    assert page.run("document.querySelector('.turn.user img').alt") == "Picture 1 of this message, d10.webp"
    page.close()


def test_a_model_that_does_not_see_gets_no_picture(page):
    assert page.run("document.querySelector('#attach').hidden")
    page.run(PASTE)
    page.until("document.querySelector('#notice').innerText.includes('does not see')")


# ---------------------------------------------------------------------- for everybody

CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const pixel = (colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (p) => p.map((c) => (c /= 255, c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const found = [];
  for (const one of document.querySelectorAll('body *')) {
    const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || one.placeholder;
    if (!own || !one.checkVisibility({visibilityProperty: true}) || one.disabled) continue;
    const grounds = [];
    for (let up = one; up; up = up.parentElement) grounds.unshift(getComputedStyle(up).backgroundColor);
    const [ink, ground] = [pixel([...grounds, getComputedStyle(one).color]), pixel(grounds)].map(light);
    found.push([(Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05), one.tagName + '.' + one.className]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""


def fill(page, server):
    """A conversation with everything in it."""
    server.replies = [Reply(says(HOSTILE + "\n> q", "Hm.")), Reply(calls(("a_0", "a", "{}")))]
    say(page, "Hello")
    ended(page, 2)
    page.click(".thought summary")
    say(page, "Call it")
    ended(page, 4)
    page.click(".results .main")
    page.until("document.querySelector('#failure p')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_contrast(page, server, theme):
    page.prefer(color_scheme=theme, reduced_motion="reduce")
    fill(page, server)
    grounds = page.run("getComputedStyle(document.body).backgroundColor")
    assert (grounds == "rgb(253, 252, 249)") == (theme == "light")
    found = page.run(CONTRASTS)
    assert len(found) > 30 and found[0][0] >= 4.5, found[:3]
    page.click("#open-settings")
    assert page.run(CONTRASTS)[0][0] >= 4.5


def test_a_chosen_theme_stays(page, server):
    page.prefer(color_scheme="light")
    page.click("#theme")
    page.click("#theme")
    assert texts(page, "#theme") == ["Theme: dark"]
    page.goto(server.url)
    page.until("document.querySelector('#model').options.length")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"


def test_every_control_has_a_name_and_every_part_its_place(page, server):
    fill(page, server)
    page.click("#open-settings")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    page.press("Escape")
    page.until("!document.querySelector('#settings').open")
    tree += page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [(n["role"]["value"], n.get("name", {}).get("value")) for n in tree if not n["ignored"]]
    controls = {"button", "textbox", "combobox", "checkbox", "spinbutton", "link"}
    assert [role for role, name in roles if role in controls and not name] == []
    found = dict(roles)
    assert {"main", "navigation", "log", "dialog", "form", "alert", "status", "heading"} <= found.keys()
    assert found["navigation"] == "Conversations" and found["log"] == "Conversation"
    assert ("textbox", "Message") in roles and ("combobox", "Effort") in roles


def test_the_keyboard_goes_through_the_page_in_order(page, server):
    server.replies = [Reply(says("Yes."))]
    say(page, "Hello")
    ended(page, 2)
    assert page.run("document.querySelector('a, button, input, select, textarea').className") == "skip"
    page.run("document.querySelector('.skip').focus()")
    seen = []
    for _ in range(14):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    assert seen[:7] == ["new", "Hello", "×", "export", "theme", "open-settings", "log"]
    assert seen[7:] == ["Copy", "Edit", "Copy", "Edit", "Again", "prompt", "effort"]


def test_a_phone(chromium, server):
    page = chromium.page(server.url, 390, 844, mobile=True)
    page.until("document.querySelector('#model').options.length")
    wide = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300
    server.replies = [Reply(says(wide))]
    page.run("document.querySelector('#prompt').focus()")
    page.type("Hello")
    page.press("Enter")  # begins a line here
    assert server.requests == []
    page.click("#send")
    ended(page, 2)
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("document.querySelector('#log').scrollWidth <= 390")
    assert page.run("getComputedStyle(document.querySelector('nav')).visibility") == "hidden"
    page.click("#menu")
    assert page.run("getComputedStyle(document.querySelector('nav')).visibility") == "visible"
    assert page.run("document.activeElement.id") == "new"
    page.press("Escape")
    assert page.run("document.activeElement.id") == "menu"
    small = "Array.from(document.querySelectorAll('main button, nav button'))"
    small += ".filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 24).length"
    assert page.run(small) == 0
    page.close()
