"""Uses the web chat in a browser: BROWSER URL KEYED_URL KEY DOOMED_URL DOOMED_PID [SCREENSHOTS].

The doomed server is killed; SCREENSHOTS is a folder for pictures of every screen.
"""

import json
import os
import pathlib
import re
import signal
import sys
import time
import urllib.request

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

BROWSER, URL, KEYED_URL, KEY, DOOMED_URL, DOOMED_PID = sys.argv[1:7]
SCREENSHOTS = pathlib.Path(sys.argv[7]) if len(sys.argv) > 7 else None
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

HOSTILE = """
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <svg onload=alert(1)> <b>not bold</b>

[a](javascript:window.hacked=3) [b](JaVaScRiPt:window.hacked=4) [c](data:text/html,<script>alert(1)</script>)
[d](vbscript:x) [e](//evil.example) [f](/stats) <javascript:alert(1)> [g](java\tscript:alert(1))
[good](https://example.org/a_(b) "title") <https://example.org/c> http://example.org/d_e. mailto: [m](mailto:a@b.example)
![picture](https://evil.example/p.png) ![x](javascript:alert(1)) [![in](https://e.example/i)](https://e.example/o)

| <script>alert(1)</script> | [x](javascript:alert(1)) |
|---|---|
| <iframe src="https://evil.example"></iframe> | `<style>*{display:none}</style>` |

<style>* { display: none }</style><meta http-equiv="refresh" content="0;url=https://evil.example">
<form action="https://evil.example"><input name=a></form>

# <h1 onclick=alert(1)>

```html"><script>alert(1)</script>
<script>window.hacked = 5</script>
"""

MARKDOWN = """# A heading

Some **bold**, *emphasis*, ***both***, ~~gone~~, `code` and snake_case_words, 2 * 3 * 4.
A second line with <br> a break &amp; an entity, \\*not emphasis\\*.

1. One
   - nested
     1. deeper
2. Two

   ```python
   def f():
   \treturn "<b>"
   ```
- [x] done
- [ ] to do

> A quote
> > within a quote

| Name | Value |
|:-----|------:|
| a \\| b | 1 |
| `c` | 2 |

---
Last."""


def events(*deltas, end="stop", usage=True, done=True):
    """A stream of server-sent events, with the deltas of a chat completion."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if end:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    if usage:
        details = {"cached_tokens": 1024}
        counts = {"prompt_tokens": 1300, "completion_tokens": 40, "prompt_tokens_details": details}
        chunks.append({"choices": [], "usage": counts})
    lines = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return ": a comment\n\n" + "".join(f"data: {line}\n\n" for line in lines)


class Chat:
    """A page in a browser without a past. Whatever it logs as an error fails the test, save what is `expected`."""

    def __init__(self, url=URL, expected=(), storage=None, **options):
        self.expected = expected
        options = {"viewport": DESKTOP, **options}
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.problems, self.dialogs, self.requests = [], [], []
        self.page.on("console", self.logged)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        if storage:
            items = json.dumps(storage)
            self.page.add_init_script(f"for (const [k, v] of Object.entries({items})) localStorage.setItem(k, v)")
        self.origin = url
        self.page.goto(url)

    def logged(self, message):
        if message.type in ("error", "warning") and not any(part in message.text for part in self.expected):
            self.problems.append(message.text)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            assert not self.problems, self.problems
            assert not self.dialogs, self.dialogs
            outside = [url for url in self.requests if not url.startswith(self.origin)]
            assert not outside, outside
        self.context.close()

    def answers_with(self, body, status=200, content_type="text/event-stream"):
        """Has the API answer with this, and keeps the bodies of requests."""
        asked = []

        def answer(route):
            asked.append(route.request.post_data_json)
            route.fulfill(status=status, content_type=content_type, body=body)

        self.page.unroute("**/v1/chat/completions")
        self.page.route("**/v1/chat/completions", answer)
        return asked

    def never_ends(self):
        """Has the server give answers that would take minutes."""
        endless = {"max_tokens": 8000, "logit_bias": {"0": -99, "2": -99}}
        self.page.route("**/v1/chat/completions", lambda route: route.continue_(
            post_data={**route.request.post_data_json, **endless}))

    def send(self, text=CAPITAL):
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def finished(self):
        expect(self.page.locator("#send")).to_be_visible()
        expect(self.page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")
        return self.page.locator("article.assistant").last

    def ask(self, text=CAPITAL):
        self.send(text)
        return self.finished()

    def texts(self):
        return self.page.locator("article :is(.bubble, .markdown)").all_inner_texts()

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()

    def conversations(self):
        return self.page.locator("#conversations a").all_inner_texts()

    def set(self, **settings):
        self.press("Settings")
        for name, value in settings.items():
            self.page.locator(f"#settings [name={name}]").fill(str(value))
        self.press("Done")

    def check_accessibility(self, name):
        found = axe.run(self.page).response["violations"]
        problems = [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found]
        assert not problems, (name, problems)

    def picture(self, name):
        if SCREENSHOTS:
            self.page.wait_for_timeout(300)
            self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


def check_an_answer_streams():
    with Chat() as chat:
        expect(chat.page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
        expect(chat.page.locator("#facts")).to_contain_text("8,192 tokens")
        expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
        chat.page.evaluate("""() => {
            window.seen = [];
            new MutationObserver(() => {
                const text = document.querySelector("article.assistant .markdown")?.textContent;
                if (text && text !== seen.at(-1)) seen.push(text);
            }).observe(document.querySelector("#messages"), { childList: true, subtree: true });
        }""")
        answer = chat.ask()
        assert chat.texts() == [CAPITAL, PARIS]
        assert PARIS.startswith(tuple(chat.page.evaluate("seen"))), chat.page.evaluate("seen")
        expect(answer.locator(".facts")).to_have_text(
            re.compile(r"^8 tokens · [\d.,]+ tokens/s · \d+ in the prompt, \d+ of them cached$"))
        expect(chat.page.locator("#status")).to_have_text(f"Answer: {PARIS}")
        expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
        # The conversation goes on, with what was said.
        asked = []
        chat.page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json))
        chat.ask("And of Italy?")
        roles = [(message["role"], message["content"]) for message in asked[0]["messages"]]
        assert roles == [("user", CAPITAL), ("assistant", PARIS), ("user", "And of Italy?")]
        assert len(chat.texts()) == 4


def check_an_answer_stops():
    with Chat() as chat:
        chat.never_ends()
        for stop in (lambda: chat.page.keyboard.press("Escape"), lambda: chat.press("Stop")):
            before = stats()["requests"]["cancelled"]
            chat.send("Tell a very long story about a ship, with many chapters.")
            last = chat.page.locator("article.assistant .markdown").last
            expect(last).to_have_text(re.compile(".{20}", re.S))
            stop()
            answer = chat.finished()
            expect(answer.locator(".facts")).to_have_text("Stopped")
            assert len(last.inner_text()) >= 20
            wait(lambda: stats()["requests"]["cancelled"] == before + 1)


def check_an_answer_is_regenerated_and_a_question_edited():
    with Chat() as chat:
        chat.ask()
        chat.press("Regenerate")
        expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
        chat.finished()
        assert chat.texts() == [CAPITAL, PARIS]
        chat.ask("Thanks.")
        chat.page.get_by_role("button", name="Edit").first.click()
        area = chat.page.get_by_label("Edit your message")
        expect(area).to_be_focused()
        chat.page.keyboard.press("Escape")
        assert len(chat.texts()) == 4
        chat.page.get_by_role("button", name="Edit").first.click()
        area.fill("What is the capital of Italy?")
        chat.page.locator(".editor").get_by_role("button", name="Send").click()
        chat.finished()
        assert chat.texts()[0] == "What is the capital of Italy?" and len(chat.texts()) == 2
        answer = chat.texts()[1]
        chat.press("Copy the answer")
        assert chat.page.evaluate("navigator.clipboard.readText()") == answer


def check_conversations_are_kept():
    with Chat() as chat:
        chat.ask()
        first = chat.page.url
        chat.page.reload()
        expect(chat.page.locator("#title")).to_have_text(CAPITAL)
        assert chat.texts() == [CAPITAL, PARIS] and chat.page.url == first
        chat.press("New conversation")
        assert chat.texts() == [] and chat.page.url != first
        chat.ask("Say hi.")
        assert chat.conversations() == ["Say hi.", CAPITAL]
        chat.page.get_by_role("link", name=CAPITAL).click()
        assert chat.texts() == [CAPITAL, PARIS] and chat.page.url == first
        chat.page.go_back()
        assert chat.texts()[0] == "Say hi."

        chat.press(f"Rename {CAPITAL}")
        chat.page.keyboard.type("Capitals")
        chat.page.keyboard.press("Enter")
        wait(lambda: "Capitals" in chat.conversations())
        chat.press("Rename Capitals")
        chat.page.keyboard.type("Not this")
        chat.page.keyboard.press("Escape")
        chat.press("Delete Say hi.")
        chat.press("Cancel")
        assert sorted(chat.conversations()) == ["Capitals", "Say hi."]
        chat.press("Delete Say hi.")
        chat.press("Delete")
        wait(lambda: chat.conversations() == ["Capitals"])
        assert chat.texts() == []
        # Another tab of the same browser sees the same.
        other = chat.context.new_page()
        other.goto(first)
        expect(other.locator("#title")).to_have_text("Capitals")
        other.get_by_role("button", name="Delete Capitals").click()
        other.get_by_role("button", name="Delete", exact=True).click()
        wait(lambda: chat.conversations() == [])
        # One that is answered goes on while another one is looked at, and survives a reload.
        chat.never_ends()
        chat.send("Tell a very long story about a ship, with many chapters.")
        expect(chat.page.locator("#stop")).to_be_visible()
        expect(chat.page.locator("article.assistant .markdown")).not_to_be_empty()
        chat.press("New conversation")
        expect(chat.page.locator("#send")).to_be_visible()
        expect(chat.page.locator("li.answering")).to_have_count(1)
        chat.page.get_by_role("link", name="Tell a very").click()
        expect(chat.page.locator("#stop")).to_be_visible()
        chat.page.reload()
        expect(chat.page.locator("article.assistant .facts")).to_have_text("Interrupted")
        assert len(chat.texts()[1]) > 0


def check_a_key_is_asked_for():
    with Chat(KEYED_URL, expected=["401"]) as chat:
        dialog = chat.page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("needs an API key")
        chat.check_accessibility("key")
        chat.picture("key")
        chat.page.get_by_label("Key", exact=True).fill("wrong")
        chat.page.keyboard.press("Enter")
        expect(dialog).to_contain_text("the API key is wrong")
        chat.press("Cancel")
        # Asking asks again, and then goes on by itself.
        chat.send()
        expect(dialog).to_contain_text("the API key is wrong")
        chat.page.get_by_label("Key", exact=True).fill(KEY)
        chat.press("Use this key")
        expect(dialog).to_be_hidden()
        expect(chat.page.locator("article.assistant .markdown")).to_have_text(PARIS)
        assert chat.texts() == [CAPITAL, PARIS]
        expect(chat.page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
        # It lasts as long as the tab, or longer if wished.
        stored = "() => [localStorage, sessionStorage].map((s) => s.getItem('russet.key'))"
        assert chat.page.evaluate(stored) == [None, KEY]
        chat.page.reload()
        expect(chat.page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
        chat.press("Settings")
        chat.press("Forget the API key")
        chat.press("Done")
        assert chat.page.evaluate(stored) == [None, None]
        chat.page.reload()
        chat.page.get_by_label("Key", exact=True).fill(KEY)
        chat.page.get_by_label("Keep it in this browser").check()
        chat.press("Use this key")
        expect(chat.page.locator("#model")).to_have_text("SmolLM2-135M-Instruct")
        assert chat.page.evaluate(stored) == [KEY, None]


def check_settings_reach_the_server():
    with Chat() as chat:
        asked = chat.answers_with(events({"content": "Yes."}))
        chat.ask()
        assert asked[0] == {
            "model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": CAPITAL}], "stream": True,
            "stream_options": {"include_usage": True},
        }
        values = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 99, "seed": 7}
        chat.set(system="Be brief.", **values)
        chat.ask("More")
        assert {name: asked[1].get(name) for name in values} == values
        assert asked[1]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert "chat_template_kwargs" not in asked[1]
        # New conversations begin with them; what can't be a value is not sent.
        chat.page.reload()
        chat.press("New conversation")
        chat.press("Settings")
        chat.page.get_by_label("Seed").fill("")
        chat.page.get_by_label("Top-p").fill("7")
        chat.press("Done")
        expect(chat.page.get_by_label("Top-p")).to_be_focused()
        chat.page.get_by_label("Reasoning").select_option("off")
        chat.press("Close the settings")
        chat.ask("Again")
        assert "top_p" not in asked[2] and "seed" not in asked[2] and asked[2]["top_k"] == 40
        assert asked[2]["chat_template_kwargs"] == {"enable_thinking": False}
        chat.press("Settings")
        chat.press("Empty all")
        chat.press("Done")
        chat.ask("And again")
        assert not {"top_k", "chat_template_kwargs"} & set(asked[3]) and asked[3]["messages"][0]["role"] == "user"


def check_markdown_is_rendered():
    with Chat() as chat:
        chat.answers_with(events(*[{"content": MARKDOWN[i:i + 3]} for i in range(0, len(MARKDOWN), 3)]))
        answer = chat.ask().locator(".markdown")
        expect(answer.locator("h3")).to_have_text("A heading")
        for tag, text in [("strong", "bold"), ("em", "emphasis"), ("em > strong, strong > em", "both"),
                          ("del", "gone"), ("p > code", "code")]:
            expect(answer.locator(f":is({tag})").filter(has_text=text).first).to_be_visible()
        expect(answer.locator("p").first).to_contain_text("snake_case_words, 2 * 3 * 4.")
        expect(answer.locator("p").first).to_contain_text("a break & an entity, *not emphasis*.")
        assert answer.locator("p").first.locator("br").count() == 2, answer.locator("p").first.inner_html()
        expect(answer.locator("ol > li > ul > li > ol > li")).to_have_text("deeper")
        expect(answer.locator("ol > li").filter(has_text="Two").locator("pre")).to_have_text(
            'def f():\n\treturn "<b>"')
        assert answer.locator(".code-head span").all_inner_texts() == ["python"]
        assert answer.locator("> ul > li").all_inner_texts() == ["☑ done", "☐ to do"]
        expect(answer.locator("blockquote blockquote")).to_have_text("within a quote")
        assert answer.locator("td").all_inner_texts() == ["a | b", "1", "c", "2"]
        assert answer.locator("hr").count() == 1
        grown = answer.inner_html()
        answer.get_by_role("button", name="Copy the code").click()
        assert chat.page.evaluate("navigator.clipboard.readText()") == 'def f():\n\treturn "<b>"'
        # Rendered step by step, it is the same as at once.
        chat.page.reload()
        assert chat.page.locator(".markdown").inner_html() == grown


def check_hostile_answers_stay_inert():
    nesting = {
        "quotes": ">" * 20_000 + " x",
        "items": "- " * 20_000 + "x",
        "deep items": "\n".join("  " * i + "- x" for i in range(400)),
        "brackets": "[" * 20_000 + "](https://example.org)" * 1300,
        "emphasis": "*a " * 8000 + "a* " * 8000,
        "stars": "*" * 24_000 + "a" + "*" * 24_000,
        "backticks": " ".join("`" * i for i in range(300)),
        "columns": "|a" * 4000 + "|\n" + "|-" * 4000 + "|\n" + "|b|\n" * 4000,
        "angles": "<https://" * 5000,
        "targets": "[a](" * 12_000,
        "parentheses": ("https://e.example/" + ")" * 1900 + " ") * 25,
        "line": "word " * 100_000,
        "lines": "x\n" * 50_000,
        "fences": "```\n" * 4001,
    }
    for name, text in [("markup", HOSTILE), *nesting.items()]:
        with Chat() as chat:
            chat.answers_with(events({"reasoning_content": HOSTILE}, {"content": text}, {
                "tool_calls": [{"index": 0, "function": {"name": HOSTILE, "arguments": HOSTILE}}]}))
            begin = time.monotonic()
            chat.send(HOSTILE)
            answer = chat.finished()
            took = time.monotonic() - begin
            assert took < 10, (name, took)
            assert chat.page.evaluate("window.hacked") is None
            depth = chat.page.evaluate("""() => {
                const depth = (node) => 1 + Math.max(0, ...Array.from(node.children, depth));
                return depth(document.querySelector("#messages"));
            }""")
            assert depth < 80, (name, depth)
            foreign = ":is(script, img, iframe, style, meta, link, form, object, embed, base, svg, input)"
            assert chat.page.locator(f"article {foreign}").count() == 0
            attributes = chat.page.evaluate("""() => Array.from(document.querySelectorAll("#messages *"))
                .flatMap((node) => node.getAttributeNames()).filter((name) => name.startsWith("on"))""")
            assert not attributes, attributes
            if name == "markup":
                links = chat.page.locator("article a")
                hrefs = [link.get_attribute("href") for link in links.all()]
                assert hrefs == [
                    "https://example.org/a_(b)", "https://example.org/c", "http://example.org/d_e",
                    "mailto:a@b.example", "https://evil.example/p.png", "https://e.example/o",
                    # Words of the markup that was not taken as such.
                    "https://evil.example/", "https://evil.example/", "https://evil.example/",
                ], hrefs
                assert all("noopener" in link.get_attribute("rel") for link in links.all())
                expect(answer.locator(".markdown")).to_contain_text("[a](javascript:window.hacked=3)")
                # The same from the browser's storage.
                chat.page.reload()
                assert chat.page.evaluate("window.hacked") is None
                chat.check_accessibility("hostile")


def check_broken_storage_is_survived():
    storage = {
        "russet.conversation.a": "{", "russet.conversation.b": "null", "russet.conversation.c": '{"messages": 5}',
        "russet.conversation.d": json.dumps({
            "id": "<b>", "title": {"toString": 1}, "updated": "x", "settings": {"system": [], "top_k": "5"},
            "messages": [None, 5, {"role": "system"}, {"role": "user", "content": {}}, {"role": "assistant", "calls": [1],
                         "usage": "x", "thought": "x", "content": "Fine."}],
        }),
        "russet.settings": "[1, 2", "russet.key": "",
        "russet.conversation.__proto__": '{"messages": [], "__proto__": {"polluted": 1}}',
    }
    with Chat(storage=storage) as chat:
        assert len(chat.conversations()) == 2
        chat.page.locator("#conversations a").first.click()
        chat.page.goto(f"{URL}/#d")
        assert "Fine." in chat.texts()
        chat.page.goto(f"{URL}/#nothing")
        assert chat.texts() == []
        assert chat.page.evaluate("({}).polluted") is None
        assert chat.ask().is_visible()


def check_full_storage_is_told():
    with Chat() as chat:
        chat.page.evaluate("""() => {
            let size = 1 << 22;
            for (let i = 0; size > 0; ) {
                try { localStorage.setItem(`filler${i}`, "x".repeat(size)); i += 1; } catch { size >>= 1; }
            }
        }""")
        chat.ask()
        expect(chat.page.get_by_role("alert")).to_contain_text("no room")
        assert chat.texts() == [CAPITAL, PARIS] and chat.conversations() == [CAPITAL]
        chat.press("New conversation")
        chat.page.get_by_role("link", name=CAPITAL).click()
        assert chat.texts() == [CAPITAL, PARIS]
        chat.page.evaluate("localStorage.clear()")
        chat.press("Regenerate")
        chat.finished()
        expect(chat.page.locator("#notice")).to_be_hidden()


def check_failures_are_told_and_tried_again():
    error = json.dumps({"error": {"message": "the queue is <b>full</b>", "type": "x", "param": None, "code": None}})
    with Chat(expected=["status of", "net::ERR"]) as chat:
        problem = chat.page.locator("article .problem")
        for body, status, kind, message in [
            (error, 429, "application/json", "the queue is <b>full</b>"),
            ("<html>", 502, "text/html", "The server answered with status 502."),
            (events({"content": "The capital"}, end=None, usage=False, done=False), 200, "text/event-stream",
             "The connection to the server ended before the answer did."),
            (f"data: {error}\n\n", 200, "text/event-stream", "the queue is <b>full</b>"),
            ("data: {{\n\n", 200, "text/event-stream", "The server sent an event that cannot be read."),
        ]:
            chat.answers_with(body, status, kind)
            if problem.count():
                chat.press("Try again")
            else:
                chat.send()
            chat.finished()
            expect(problem).to_contain_text(message)
        chat.check_accessibility("problem")
        chat.page.unroute("**/v1/chat/completions")
        chat.page.route("**/v1/chat/completions", lambda route: route.abort())
        chat.press("Try again")
        chat.finished()
        expect(problem).to_contain_text("The server cannot be reached.")
        # A question after one that was not answered: one turn for the template.
        asked = chat.answers_with(events({"content": PARIS}))
        chat.ask("Please.")
        assert asked[0]["messages"] == [{"role": "user", "content": f"{CAPITAL}\n\nPlease."}]
        expect(problem.last).to_be_hidden()


def check_a_server_that_dies_leaves_what_it_said():
    with Chat(DOOMED_URL, expected=["net::ERR"]) as chat:
        chat.never_ends()
        chat.send()
        last, problem = (chat.page.locator(f"article.assistant .{name}") for name in ("markdown", "problem"))
        expect(last).to_have_text(re.compile(".{20}", re.S))
        os.kill(int(DOOMED_PID), signal.SIGKILL)
        chat.finished()
        expect(problem).to_contain_text("The connection to the server was lost.")
        assert len(last.inner_text()) >= 20
        chat.press("Try again")
        chat.finished()
        expect(problem).to_contain_text("The server cannot be reached.")


def check_reasoning_and_tool_calls_are_shown():
    with Chat() as chat:
        call = {"index": 0, "id": "1", "type": "function"}
        chat.answers_with(events(
            {"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "think."},
            {"content": "I look it up."}, {"tool_calls": [{**call, "function": {"name": "weather", "arguments": ""}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]}, end="tool_calls"))
        answer = chat.ask()
        thoughts = answer.locator(".thoughts")
        expect(thoughts).to_be_hidden()
        answer.get_by_text("Thought for").click()
        expect(thoughts).to_have_text("Let me think.")
        expect(answer.locator(".call")).to_contain_text("Calls the tool weather")
        expect(answer.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')
        expect(answer.locator(".facts")).to_contain_text("1,300 in the prompt, 1,024 of them cached")
        chat.check_accessibility("reasoning")
        chat.answers_with(events({"content": "Cut"}, end="length"))
        expect(chat.ask("More").locator(".facts")).to_contain_text("Cut at the limit of tokens")


def check_the_keyboard_reaches_everything():
    with Chat() as chat:
        page = chat.page
        chat.answers_with(events({"content": "```sh\nls\n```"}))
        chat.ask()
        page.evaluate("document.activeElement.blur()")
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            focused = page.evaluate("""() => {
                const { activeElement: node } = document;
                const style = getComputedStyle(node);
                const isSeen = style.outlineStyle !== "none" || node.id === "input" || node === document.body;
                if (!isSeen) return `unseen ${node.outerHTML}`;
                return node.ariaLabel || node.textContent.trim();
            }""")
            reached.append(focused)
        reached = reached[reached.index("Skip to the message box"):]
        assert not [name for name in reached if name.startswith("unseen")], reached
        order = ["Skip to the message box", "New conversation", CAPITAL, f"Rename {CAPITAL}", f"Delete {CAPITAL}",
                 "Settings", "Edit", "Copy your message", "Copy the code", "Code, sh", "Copy the answer", "Regenerate",
                 "Message", "Send"]
        assert [name for name in reached if name in order][:len(order)] == order, reached
        page.get_by_label("Message", exact=True).fill("a")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("b")
        expect(page.get_by_label("Message", exact=True)).to_have_value("a\nb")
        page.get_by_label("Message", exact=True).fill("  \n ")
        page.keyboard.press("Enter")
        assert len(chat.texts()) == 2
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        settings = page.get_by_role("button", name="Settings")
        settings.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
        page.keyboard.press("Escape")
        expect(settings).to_be_focused()


def check_every_screen():
    long = "An answer with `" + "a_very_long_word_" * 20 + "` and https://example.org/" + "x" * 200
    table = "|" + "|".join(f"column {i}" for i in range(12)) + "|\n" + "|-" * 12 + "|\n" + "|1" * 12 + "|"
    for scheme in ("light", "dark"):
        for size, viewport in {"desktop": DESKTOP, "phone": PHONE, "small": {"width": 360, "height": 640}}.items():
            is_phone = size != "desktop"
            with Chat(viewport=viewport, color_scheme=scheme, has_touch=is_phone, reduced_motion="reduce") as chat:
                name = f"{size}-{scheme}"
                expect(chat.page.locator("#facts")).not_to_be_empty()
                chat.check_accessibility(f"{name}-welcome")
                chat.picture(f"{name}-welcome")
                for question, answer in [("How do I sort a list in Python?", MARKDOWN), (long, f"{long}\n\n{table}"),
                                         ("Thanks!", "You are welcome.")]:
                    chat.answers_with(events({"reasoning_content": "The user asks."}, {"content": answer}))
                    chat.page.get_by_label("Message", exact=True).fill(question)
                    if is_phone:
                        # Enter begins a line there.
                        chat.page.keyboard.press("Enter")
                        expect(chat.page.get_by_label("Message", exact=True)).to_have_value(f"{question}\n")
                    chat.press("Send")
                    chat.finished()
                chat.check_accessibility(name)
                chat.picture(name)
                overflow = chat.page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert overflow <= 0, (name, overflow)
                scroller = chat.page.locator("#scroller")
                wide = scroller.evaluate("(node) => node.scrollWidth - node.clientWidth")
                assert wide <= 0, (name, wide)
                # It follows what comes, until one scrolls up.
                latest = chat.page.get_by_role("button", name="Go to the latest message")
                expect(latest).to_be_hidden()
                scroller.evaluate("(node) => node.scrollTo(0, 0)")
                expect(latest).to_be_visible()
                chat.picture(f"{name}-top")
                latest.click()
                expect(latest).to_be_hidden()
                if is_phone:
                    chat.press("Conversations")
                    expect(chat.page.get_by_role("navigation")).to_be_visible()
                    chat.check_accessibility(f"{name}-list")
                    chat.picture(f"{name}-list")
                    chat.page.keyboard.press("Escape")
                    expect(chat.page.get_by_role("navigation")).to_be_hidden()
                chat.press("Settings")
                chat.check_accessibility(f"{name}-settings")
                chat.picture(f"{name}-settings")


def stats():
    with urllib.request.urlopen(f"{URL}/stats") as response:
        return json.load(response)


def wait(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


axe = Axe()
expect.set_options(timeout=20_000)
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=BROWSER)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name, flush=True)
