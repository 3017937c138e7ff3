"""The real `openai` client against a running `argodrive serve`: openai_client.py BASE_URL MODEL KEY."""

import sys
import threading
import urllib.request

import openai

base_url, model, key = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=120)
STORY = "Once upon a time there was a little"


def refused(kind, code, call, **arguments):
    """The call must raise `kind`, with the API's code."""
    try:
        call(**arguments)
    except kind as error:
        assert error.code == code, (code, error.code, error)
        return error
    raise AssertionError(f"{arguments} was not refused")


def metric(name):
    request = urllib.request.Request(
        base_url.removesuffix("/v1") + "/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name}")


# models
assert [m.id for m in client.models.list()] == [model]
assert client.models.retrieve(model).owned_by == "argodrive"

# a chat, whole and streamed
question = [{"role": "user", "content": "What is 17 + 25?"}]
reply = client.chat.completions.create(model=model, messages=question, temperature=0)
text = reply.choices[0].message.content
assert text and reply.choices[0].finish_reason == "stop" and reply.choices[0].message.role == "assistant"
usage = reply.usage
assert usage.prompt_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
chunks = list(
    client.chat.completions.create(
        model=model, messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
    )
)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1) and chunks[-1].choices == []
assert chunks[-1].usage.completion_tokens == usage.completion_tokens
assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"

# a growing chat is read on from where it stood
talk = [{"role": "user", "content": "Tell me a short story about a fox."}]
first = client.chat.completions.create(model=model, messages=talk, max_completion_tokens=20, temperature=0)
assert first.choices[0].finish_reason == "length" and first.usage.completion_tokens == 20
talk += [
    {"role": "assistant", "content": first.choices[0].message.content},
    {"role": "user", "content": [{"type": "text", "text": "And one about a bear."}]},
]
second = client.chat.completions.create(model=model, messages=talk, max_tokens=20, temperature=0)
cached = second.usage.prompt_tokens_details.cached_tokens
assert cached >= first.usage.prompt_tokens, second.usage
print(f"a second turn of {second.usage.prompt_tokens} tokens: {cached} were not read again")

# completions: stop strings, seeds
whole = client.completions.create(model=model, prompt=STORY, max_tokens=40, temperature=0).choices[0].text
piece = whole[len(whole) // 3 : len(whole) // 3 + 7]
cut = client.completions.create(model=model, prompt=STORY, max_tokens=40, temperature=0, stop=[piece])
assert cut.choices[0].text == whole[: whole.index(piece)] and cut.choices[0].finish_reason == "stop"
pieces = [
    c.choices[0].text
    for c in client.completions.create(
        model=model, prompt=STORY, max_tokens=40, temperature=0, stop=piece, stream=True
    )
]
assert "".join(pieces) == cut.choices[0].text
drawn = [
    client.completions.create(model=model, prompt=STORY, max_tokens=20, temperature=1.5, seed=seed).choices[0].text
    for seed in (5, 5, 6)
]
assert drawn[0] == drawn[1] != drawn[2]
assert client.completions.create(model=model, prompt=STORY).usage.completion_tokens == 16, "the API's own default"

# refusals arrive as the client's exceptions
chat, complete = client.chat.completions.create, client.completions.create
refused(openai.NotFoundError, "model_not_found", chat, model="gpt-5", messages=question)
tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
refused(openai.BadRequestError, "unsupported_parameter", chat, model=model, messages=question, tools=[tool])
refused(openai.BadRequestError, "unsupported_parameter", chat, model=model, messages=question, n=2)
refused(openai.BadRequestError, "unsupported_parameter", chat, model=model, messages=question, logprobs=True)
refused(openai.BadRequestError, "unknown_parameter", chat, model=model, messages=question, extra_body={"min_p": 0.1})
error = refused(openai.BadRequestError, "context_length_exceeded", complete, model=model, prompt=[7] * 5000)
assert "4096" in error.message and error.param == "prompt"
wrong = openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0)
refused(openai.AuthenticationError, "invalid_api_key", wrong.models.list)

# a client that stops reading gives its text up
before = metric("argodrive_cancelled_total")
stream = complete(model=model, prompt="fn main() {\n    let", max_tokens=4000, temperature=0, stream=True)
next(iter(stream))
stream.close()
after = threading.Event()
for _ in range(600):
    if metric("argodrive_cancelled_total") == before + 1 and metric("argodrive_generating") == 0:
        break
    after.wait(0.1)
else:
    raise AssertionError("the text goes on although nobody reads it")

# several at once: one at work, two waiting, the fourth is told to come again
results = []


def ask():
    try:
        complete(model=model, prompt="fn main() {\n    let", max_tokens=150, temperature=0)
        results.append("ok")
    except openai.RateLimitError as error:
        assert error.response.headers["retry-after"]
        results.append("later")


threads = [threading.Thread(target=ask) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
assert results.count("ok") >= 3 and results.count("later") >= 1, results

print(f"openai {openai.__version__}: all is as the client expects")
