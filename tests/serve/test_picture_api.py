"""Pictures and videos over HTTP, on a small model that sees: three shapes of requests, files, all that is wrong."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import pytest
import torch
from PIL import Image as Pillow
from seeing import data_url, drawing, picture, seeing_model
from served import TOKENIZER, Served, message, served, user

from nanok3.data.video import read_video
from nanok3.serve import files_api, picture_sources
from nanok3.serve.api import make_app
from nanok3.serve.engine import Engine, Settings
from nanok3.serve.file_store import FilesLimits
from nanok3.serve.http_gate import GateSettings
from nanok3.serve.picture_sources import PictureSettings
from nanok3.serve.pictures import Eyes, show
from nanok3.serve.runner import Runner
from nanok3.serve.scheduler import Limits
from nanok3.serve.server import PAD, ServerSettings

pytestmark = pytest.mark.usefixtures("unchecked")
CHAT, PAD_ID = "/v1/chat/completions", TOKENIZER.special[PAD]
QUIET = {"thinking": {"type": "disabled"}}
ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
SETTINGS = ServerSettings(
    names=("seer",),
    gate=GateSettings(keys=("alice", "bob")),
    pictures=PictureSettings(count=3, frames=10, patches=200, files=FilesLimits(count=3, bytes=100_000)),
)


@pytest.fixture(scope="module")
def model():
    return seeing_model()


@pytest.fixture(scope="module")
def seer(model):
    limits = Limits(budget=64, max_sequences=4, grid=1)
    engine = Engine(Runner(model, 8 << 20), {1}, list(range(256, 512)), Settings(16, limits=limits))
    app = make_app(engine, TOKENIZER, SETTINGS)
    engine.start()
    yield Served(app, engine)
    engine.drain(0)


def shown(*urls, text="What is it?"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def ask(seer, messages, headers=ALICE, **fields):
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, "logprobs": True, **QUIET, **fields}
    return seer.post(CHAT, body, headers)


def said(body):
    return body["choices"][0]["logprobs"]["content"][0]["logprob"]


def test_the_answer_is_the_models_own(seer, model):
    """Prompt, count and first token as from one forward pass over the rendered ids."""
    urls = [data_url(drawing(1)), data_url(drawing(2))]
    body = ask(seer, shown(*urls)).json()
    ids = seer.post("/tokenize", {"messages": shown(*urls), **QUIET}, ALICE).json()["tokens"]
    assert ids.count(PAD_ID) == 24 and body["usage"]["prompt_tokens"] == len(ids) - 2 - len("response")
    text = "<|media_begin|>image 100x70<|media_content|><|media_pad|><|media_end|>"
    prompt = seer.post("/apply-template", {"messages": shown(data_url(drawing(1)))}, ALICE).json()["prompt"]
    assert text + "What is it?" in prompt
    both = [picture(1), picture(2)]
    with torch.no_grad():
        media = {
            "pixel_values": torch.cat([p.pixel_values for p in both]),
            "grid_thw": torch.cat([p.grid_thw for p in both]),
        }
        logits = model(torch.tensor([ids]), **media).logits[0, -1]
    logits[256:] = -torch.inf
    assert said(body) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)


def test_the_same_picture_hits_and_another_misses(seer):
    text, start = "x" * 100, len('<|>message role="user"<|><|>image 100x70<|>')
    cached = []
    for seed in (5, 5, 6):
        cached.append(ask(seer, shown(data_url(drawing(seed)), text=text)).json()["usage"]["cached_tokens"])
    assert max(cached[0], cached[2]) <= start < start + 100 < cached[1]
    jpeg = ask(seer, shown(data_url(drawing(5, kind="BMP"), "image/bmp"), text=text)).json()["usage"]
    assert jpeg["cached_tokens"] == cached[1], "the same pixels from another file"


def test_three_apis_say_the_same(seer):
    data = data_url(drawing(7))
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}}
    text = {"type": "text", "text": "What is it?"}
    anthropic = {"messages": [{"role": "user", "content": [block, text]}], "max_tokens": 2, **QUIET}
    items = [{"type": "input_image", "image_url": data}, {"type": "input_text", "text": "What is it?"}]
    usage = ask(seer, shown(data)).json()["usage"]
    counted = seer.post("/v1/messages/count_tokens", anthropic, ALICE).json()
    assert counted["input_tokens"] == usage["prompt_tokens"]
    got = seer.post("/v1/messages", anthropic, ALICE).json()["usage"]
    assert got["input_tokens"] + got["cache_read_input_tokens"] == usage["prompt_tokens"]
    response = seer.post(
        "/v1/responses", {"input": [{"role": "user", "content": items}], "max_output_tokens": 2, **QUIET}, ALICE
    )
    assert response.json()["usage"]["input_tokens"] == usage["prompt_tokens"]
    result = {"type": "tool_result", "tool_use_id": "a_0", "content": [block]}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a_0", "name": "a", "input": {}}]}
    body = {"messages": [user("hi"), call, {"role": "user", "content": [result]}], "max_tokens": 2}
    assert seer.post("/v1/messages", body, ALICE).status_code == 200


# ---------------------------------------------------------------------- what is wrong


def broken():
    whole = drawing(3)
    frames = [Pillow.new("RGB", (40, 40), color) for color in ("red", "green", "blue")]
    animation, bomb = io.BytesIO(), io.BytesIO()
    frames[0].save(animation, "GIF", save_all=True, append_images=frames[1:])
    Pillow.new("1", (9000, 9000)).save(bomb, "PNG")
    return {
        "truncated": (data_url(whole[: len(whole) // 2]), "cut short"),
        "empty": ("data:image/png;base64,", "empty"),
        "no base64": ("data:image/png;base64,!!!", "base64"),
        "not a picture": (data_url(b"<svg onload=alert(1)>"), "not an image"),
        "wrong mime": (data_url(whole, "image/jpeg"), "announced as image/jpeg"),
        "unknown mime": (data_url(whole, "image/tiff"), "allowed: image/png"),
        "animated": (data_url(animation.getvalue(), "image/gif"), "animation of 3 frames"),
        "bomb": (data_url(bomb.getvalue()), "pixels"),
        "no file": ("ms://file-0", "no file"),
    }


@pytest.mark.parametrize("kind", broken())
def test_what_cannot_be_read_is_400_and_named(seer, kind):
    url, words = broken()[kind]
    response = ask(seer, [user("hi"), *shown(data_url(drawing(1)), url)])
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages[1].content[1].image_url"
    assert words in error["message"] and error["message"].startswith(error["param"])


@pytest.mark.parametrize(
    "url", ["http://example.org/a.png", "https://10.0.0.1/a", "file:///etc/passwd", "ms://", 5, None]
)
def test_no_other_addresses(seer, url):
    response = ask(seer, shown(url))
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages[0].content[0].image_url"


def test_mistakes_are_named_as_each_api_has_them(seer):
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = {"system": "Be brief.", "messages": [{"role": "user", "content": [bad]}], "max_tokens": 2}
    error = seer.post("/v1/messages", body, ALICE).json()["error"]
    assert error["message"].startswith("messages[0].content[0].source: ")
    item = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
    error = seer.post("/v1/responses", {"instructions": "x", "input": [item]}, ALICE).json()["error"]
    assert error["param"] == "input[0].content[0].file_id"


def test_pictures_of_a_request_are_limited(seer):
    url = data_url(drawing(1))
    many = ask(seer, shown(*[url] * 4)).json()["error"]
    assert "4 pictures; allowed: 3" in many["message"] and many["param"] == "messages[0].content[3].image_url"
    large = data_url(drawing(1, 280, 280))
    patches = ask(seer, shown(url, large)).json()["error"]
    assert "patches" in patches["message"] and patches["param"] == "messages[0].content[1].image_url"


def test_placeholders_without_pictures(seer):
    response = seer.post("/v1/completions", {"prompt": [65, PAD_ID, 66], "max_tokens": 1}, ALICE)
    assert response.status_code == 400 and "placeholders" in response.json()["error"]["message"]
    for typed in ("<|media_pad|>", "<|kimi_image_placeholder|>", "<|media_begin|>image 1x1<|media_content|>"):
        ids = seer.post("/tokenize", {"messages": [user(typed)]}, ALICE).json()["tokens"]
        assert PAD_ID not in ids and ask(seer, [user(typed)]).status_code == 200


def test_a_model_that_reads_text_only():
    with served(message()) as stub:
        response = stub.post(CHAT, {"messages": shown(data_url(drawing(1)))})
        assert response.status_code == 400 and "no vision tower" in response.json()["error"]["message"]
        assert stub.chat("<|kimi_image_placeholder|>").status_code == 200


# ---------------------------------------------------------------------- files


def form(content, purpose="image", name="a.png", boundary="b0und"):
    parts = [f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'.encode()]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: image/png'
    parts += [head.encode() + b"\r\n\r\n" + content + b"\r\n", f"--{boundary}--\r\n".encode()]
    return b"".join(parts), {"content-type": f"multipart/form-data; boundary={boundary}"}


def upload(seer, content, headers=ALICE, **fields):
    body, kind = form(content, **fields)
    return seer.post("/v1/files", content=body, headers={**headers, **kind})


def test_a_file_is_uploaded_named_and_deleted(seer):
    content = drawing(8)
    made = upload(seer, content, name="ä b.png").json()
    assert made["object"] == "file" and made["bytes"] == len(content) and made["filename"] == "ä b.png"
    assert made["purpose"] == "image" and len(made["id"]) == 37
    one = f"/v1/files/{made['id']}"
    assert seer.get(one, ALICE).json() == made and made in seer.get("/v1/files", ALICE).json()["data"]
    got = seer.get(f"{one}/content", ALICE)
    assert got.content == content and got.headers["content-type"] == "application/octet-stream"
    by_file, by_data = (ask(seer, shown(url)).json() for url in (f"ms://{made['id']}", data_url(content)))
    assert said(by_file) == pytest.approx(said(by_data), abs=1e-4)
    source = {"type": "file", "file_id": made["id"]}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}
    assert seer.post("/v1/messages", body, ALICE).status_code == 200
    # another key sees nothing of it
    assert seer.get(one, BOB).status_code == seer.get(f"{one}/content", BOB).status_code == 404
    assert (
        seer.request("DELETE", one, headers=BOB).status_code == 404 and seer.get("/v1/files", BOB).json()["data"] == []
    )
    assert ask(seer, shown(f"ms://{made['id']}"), BOB).status_code == 400
    assert seer.get("/v1/files").status_code == 401
    assert seer.request("DELETE", one, headers=ALICE).json() == {"id": made["id"], "object": "file", "deleted": True}
    assert seer.get(one, ALICE).status_code == 404 and ask(seer, shown(f"ms://{made['id']}")).status_code == 400


def test_uploads_that_are_refused(seer):
    content = drawing(1)
    for refused, param in (
        (upload(seer, b""), "file"),
        (upload(seer, b"no picture"), "file"),
        (upload(seer, content[:200]), "file"),
        (upload(seer, content, purpose="fun"), "purpose"),
        (upload(seer, b"x" * 100_001, purpose="user_data"), "file"),
        (seer.post("/v1/files", {"file": "x"}, ALICE), "content-type"),
        (seer.post("/v1/files", content=form(content)[0][:-20], headers={**ALICE, **form(content)[1]}), "file"),
        (seer.post("/v1/files", content=b"", headers={**ALICE, **form(content)[1]}), "file"),
    ):
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    made = [upload(seer, b"text", purpose="assistants").json()["id"] for _ in range(3)]
    assert (
        upload(seer, content).json()["error"]["code"] == "too_many_files"
        and upload(seer, content, BOB).status_code == 200
    )
    first = seer.get("/v1/files?limit=2", ALICE).json()
    assert [one["id"] for one in first["data"]] == made[:0:-1] and first["has_more"]
    assert seer.get(f"/v1/files?after={made[1]}", ALICE).json()["data"][0]["id"] == made[0]
    assert seer.get("/v1/files?purpose=image", ALICE).json()["data"] == []
    assert seer.get("/v1/files?limit=x", ALICE).status_code == seer.get("/v1/files?after=x", ALICE).status_code == 400
    for id in made:
        seer.request("DELETE", f"/v1/files/{id}", headers=ALICE)


def test_a_form_may_hold_any_bytes():
    content = bytes(range(256)) * 3 + b"\r\n--b0un\r\n\r\n--"
    body, headers = form(content)
    assert files_api.read_form(headers["content-type"], body)["file"] == ("a.png", content)
    assert files_api.read_form('multipart/form-data; boundary="b0und"', body)["purpose"] == ("", b"image")


def test_headers_and_parts_of_a_form_are_bounded(seer):
    many = "0" * 5000
    for kind, body, what in [
        ("multipart/form-data; boundary=B", f"--B\r\ncontent-disposition: form-data; name*{many}=x\r\n\r\n", "be read"),
        (f"multipart/form-data; boundary*{many}=B", "", "be read"),
        (
            "multipart/form-data; boundary=B",
            "--B\r\ncontent-disposition: form-data; name=file\r\n\r\n\r\n" * 99,
            "99 parts",
        ),
    ]:
        answer = seer.post("/v1/files", headers={**ALICE, "content-type": kind}, content=body.encode() + b"\r\n--B--")
        assert answer.status_code == 400 and what in answer.json()["error"]["message"]


def test_web_addresses_where_they_are_allowed(model, monkeypatch):
    asked = []
    monkeypatch.setattr(picture_sources, "fetch", lambda url, most: asked.append((url, most)) or drawing(1))
    settings = ServerSettings(names=("seer",), pictures=PictureSettings(from_web=True, file_bytes=50_000))
    engine = Engine(Runner(model, 8 << 20), {1}, [PAD_ID], Settings(16))
    server = Served(make_app(engine, TOKENIZER, settings), engine)
    body = {"messages": shown("https://example.org/a.png")}
    assert server.post("/tokenize", body).json()["tokens"].count(PAD_ID) == 12
    assert asked == [("https://example.org/a.png", 50_000)]
    monkeypatch.undo()
    error = server.post("/tokenize", {"messages": shown("http://localhost/a.png")}).json()["error"]
    assert "inside this machine" in error["message"] and error["param"] == "messages[0].content[0].image_url"


# ---------------------------------------------------------------------- videos


def film(frames=6, seed=1, size=(64, 48), kind="mp4"):
    """The bytes of a video of noise in four-frame chunks, 8 frames a second."""
    av = pytest.importorskip("av")
    file, generator = io.BytesIO(), torch.Generator().manual_seed(seed)
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(frames):
            levels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(levels.numpy())))
        container.mux(stream.encode())
    return file.getvalue()


def watched(*urls, text="What happens?"):
    parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def video_url(data):
    return data_url(data, "video/mp4")


def test_a_video_is_answered_as_the_model_itself_would(seer, model):
    data = film()
    chunks = read_video(data).chunks
    ids = seer.post("/tokenize", {"messages": watched(video_url(data)), **QUIET}, ALICE).json()["tokens"]
    assert [c.grid_thw.tolist() for c in chunks] == [[[4, 4, 6]], [[2, 4, 6]]] and ids.count(PAD_ID) == 12
    prompt = seer.post("/apply-template", {"messages": watched(video_url(data))}, ALICE).json()["prompt"]
    assert "00:00:00.500<|media_begin|>video 64x48<|media_content|><|media_pad|><|media_end|>What happens?" in prompt
    body = ask(seer, watched(video_url(data))).json()
    assert body["usage"]["prompt_tokens"] == len(ids) - 2 - len("response")
    with torch.no_grad():
        pixels, grids = (torch.cat([getattr(c, name) for c in chunks]) for name in ("pixel_values", "grid_thw"))
        logits = model(torch.tensor([ids]), pixel_values=pixels, grid_thw=grids).logits[0, -1]
    logits[256:] = -torch.inf
    assert said(body) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)


def test_the_same_video_hits_and_another_misses(seer):
    text, start = "x" * 100, len('<|>message role="user"<|>00:00:00.000<|>video 64x48<|>')
    cached = [
        ask(seer, watched(video_url(film(seed=seed)), text=text)).json()["usage"]["cached_tokens"] for seed in (5, 5, 6)
    ]
    assert max(cached[0], cached[2]) <= start < start + 100 < cached[1]


def test_pictures_and_videos_stand_in_their_order(seer, model):
    data = film(5, seed=9)
    parts = [*shown(data_url(drawing(1)))[0]["content"][:1], *watched(video_url(data))[0]["content"]]
    messages = [{"role": "user", "content": parts}]
    ids = seer.post("/tokenize", {"messages": messages, **QUIET}, ALICE).json()["tokens"]
    items = [picture(1), *read_video(data).chunks]
    with torch.no_grad():
        pixels, grids = (torch.cat([getattr(c, name) for c in items]) for name in ("pixel_values", "grid_thw"))
        logits = model(torch.tensor([ids]), pixel_values=pixels, grid_thw=grids).logits[0, -1]
    logits[256:] = -torch.inf
    assert said(ask(seer, messages).json()) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)


def test_an_uploaded_video(seer):
    data = film(4, seed=3, size=(32, 32))
    made = upload(seer, data, purpose="video", name="a.mp4").json()
    by_file, by_data = (ask(seer, watched(url)).json() for url in (f"ms://{made['id']}", video_url(data)))
    assert said(by_file) == pytest.approx(said(by_data), abs=1e-4)
    as_picture = ask(seer, shown(f"ms://{made['id']}"))
    assert as_picture.status_code == 400 and "not an image" in as_picture.json()["error"]["message"]
    refused = upload(seer, data[:200], purpose="video", name="a.mp4")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "file"
    seer.request("DELETE", f"/v1/files/{made['id']}", headers=ALICE)


def broken_videos():
    whole = film(40)
    return {
        "truncated": (video_url(whole[: len(whole) // 2]), "damaged"),
        "cut in a frame": (video_url(film(8, size=(32, 32), kind="avi")[:-3000]), "damaged or cut short"),
        "empty": ("data:video/mp4;base64,", "empty"),
        "no base64": ("data:video/mp4;base64,!!!", "base64"),
        "a picture": (video_url(drawing(1)), "no video of"),
        "not a video": (video_url(b"#EXTM3U\nfile:///etc/passwd"), "no video of"),
        "too long": (video_url(film(11, size=(32, 32))), "more than 10 frames"),
        "too large": (video_url(film(9)), "patches of 14 x 14 pixels"),
        "wrong kind": (data_url(drawing(1)), "data:video/"),
        "web": ("https://example.org/a.mp4", "fetches no web addresses"),
        "no file": ("ms://file-0", "no file"),
        "nothing": (None, "data:video/"),
    }


@pytest.mark.parametrize("kind", ["truncated", "cut in a frame", "empty", "no base64", "a picture", "not a video"])
def test_a_video_that_cannot_be_read_is_400_and_named(seer, kind):
    refuses(seer, *broken_videos()[kind])


@pytest.mark.parametrize("kind", ["too long", "too large", "wrong kind", "web", "no file", "nothing"])
def test_a_video_beyond_the_limits_is_400_and_named(seer, kind):
    refuses(seer, *broken_videos()[kind])


def refuses(seer, url, words):
    response = ask(seer, [user("hi"), *watched(url)])
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages[1].content[0].video_url"
    assert words in error["message"] and error["message"].startswith(error["param"])


def test_what_is_decoded_of_a_video_is_bounded():
    """Frames that are not taken cost time, too, while every other picture waits."""
    data = film(6)
    assert picture_sources.PictureSources(PictureSettings(decoded=6 << 16)).decode_video(data).items
    with pytest.raises(ValueError, match=r"393216 pixels in the frames up to 0.6.* s; at most 393215 are decoded"):
        picture_sources.PictureSources(PictureSettings(decoded=(6 << 16) - 1)).decode_video(data)


def test_videos_of_a_request_are_limited(seer):
    many = ask(seer, watched(*[video_url(film(2, size=(32, 32)))] * 3)).json()["error"]
    assert "3 videos; allowed: 2" in many["message"] and many["param"] == "messages[0].content[2].video_url"
    with served(message()) as stub:
        response = stub.post(CHAT, {"messages": watched(video_url(b"x"))})
        assert response.status_code == 400 and "is a video; allowed: text" in response.json()["error"]["message"]


def number(seer, name):
    (line,) = [line for line in seer.get("/metrics", ALICE).text.splitlines() if line.startswith(f"nanok3_{name} ")]
    return float(line.split()[-1])


def test_pictures_and_files_are_counted(seer):
    names = ['media_opened_total{kind="picture"}', 'media_opened_total{kind="video"}', "media_refused_total"]
    names += ["files", "file_bytes", "files_uploaded_total"]
    before = [number(seer, name) for name in names]
    made = upload(seer, drawing(1)).json()
    ask(seer, shown(data_url(drawing(1)), f"ms://{made['id']}"))
    ask(seer, watched(video_url(film(1))))
    ask(seer, shown("data:image/png;base64,!!!"))
    after = [number(seer, name) for name in names]
    assert [b - a for a, b in zip(before, after)] == [2, 1, 1, 1, made["bytes"], 1]
    seer.request("DELETE", f"/v1/files/{made['id']}", headers=ALICE)
    assert number(seer, "files") == before[3] and number(seer, "media_bytes") == 0


def test_the_document_describes_a_form(seer):
    paths = seer.get("/openapi.json", ALICE).json()["paths"]["/v1/files"]
    schema = paths["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert schema["properties"]["file"]["format"] == "binary" and schema["required"] == ["file", "purpose"]
    assert {one["name"] for one in paths["get"]["parameters"]} == {"purpose", "limit", "after", "order"}


def test_the_list_of_models_says_what_they_see(seer):
    found = seer.get("/v1/models/seer", ALICE).json()
    assert found["supports_image_in"] and found["supports_video_in"]


def test_a_decoded_video_is_kept_within_bounds():
    sources = picture_sources.PictureSources(PictureSettings(cache_bytes=120_000))
    first, second = film(1, seed=1), film(2, seed=2)
    kept = sources.decode_video(first)
    assert sources.decode_video(first) is kept
    sources.decode_video(second)
    assert sources.decode_video(first) is not kept, "it had to leave for the second"


# ---------------------------------------------------------------------- the tower's own thread


def test_text_goes_on_while_a_picture_is_looked_at(seer, monkeypatch):
    """The tower is held up until a whole stream of text has been said."""
    eyes, begun, go_on = seer.engine.runner.eyes, threading.Event(), threading.Event()
    look, threads = eyes._look, []

    def slow(picture):
        threads.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return look(picture)

    monkeypatch.setattr(eyes, "_look", slow)
    body = {"messages": shown(data_url(drawing(77))), "max_tokens": 2, "temperature": 0, **QUIET}
    text = {"messages": [user("hi")], "max_tokens": 4, "stream": True, **QUIET}

    async def both():
        async with seer.client(**ALICE) as client:
            picture = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.to_thread(begun.wait, 60)
            said = await client.post(CHAT, json=text)
            assert said.text.endswith("data: [DONE]\n\n") and not picture.done()
            go_on.set()
            return await picture

    answer = asyncio.run(both())
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    assert threads == ["tower_0"], "once, and not in the engine's thread"
    assert ask(seer, body["messages"]).status_code == 200 and len(threads) == 1


def test_a_client_that_leaves_before_its_picture_was_looked_at(seer, monkeypatch):
    eyes, begun, go_on = seer.engine.runner.eyes, threading.Event(), threading.Event()
    look = eyes._look
    monkeypatch.setattr(eyes, "_look", lambda picture: begun.set() or (go_on.wait(60) and look(picture)))
    steps = seer.engine.counters.finished.copy()

    async def leave():
        async with seer.client(**ALICE) as client:
            asking = asyncio.create_task(client.post(CHAT, json={"messages": shown(data_url(drawing(78))), **QUIET}))
            await asyncio.to_thread(begun.wait, 60)
            asking.cancel()
            go_on.set()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(0.2)

    asyncio.run(leave())
    assert seer.is_free() and seer.engine.pixels.bytes == 0
    assert sum(seer.engine.counters.finished.values()) <= sum(steps.values()) + 1


def test_a_request_has_the_time_it_asked_for_tower_included(seer, monkeypatch):
    eyes = seer.engine.runner.eyes
    look = eyes._look
    monkeypatch.setattr(eyes, "_look", lambda picture: time.sleep(0.3) or look(picture))
    late = ask(seer, shown(data_url(drawing(79))), timeout=0.2)
    assert late.status_code == 504 and late.json()["error"]["param"] == "timeout"


def test_the_time_is_over_while_the_tower_still_looks(seer, monkeypatch):
    """And what it has not begun by then it leaves."""
    eyes, go_on, looked = seer.engine.runner.eyes, threading.Event(), []
    monkeypatch.setattr(eyes, "_look", lambda picture: looked.append(picture) or go_on.wait(60))
    for stream in (False, True):
        late = ask(seer, shown(*[data_url(drawing(80 + k)) for k in range(3)]), timeout=0.2, stream=stream)
        assert "more than its 0.2 seconds" in late.text and (stream or late.status_code == 504)
    assert len(looked) == 1 and not go_on.is_set()
    go_on.set()
    assert seer.is_free() and seer.engine.pixels.bytes == 0 and len(looked) == 1


def test_pictures_that_nobody_waits_for_are_not_looked_at(seer, monkeypatch):
    """A client leaves in the first of its three; another's, behind it, comes at once."""
    eyes, begun, go_on, looked = seer.engine.runner.eyes, threading.Event(), threading.Event(), []
    look = eyes._look
    monkeypatch.setattr(eyes, "_look", lambda one: looked.append(one) or begun.set() or (go_on.wait(60) and look(one)))

    async def leave():
        async with seer.client(**ALICE) as client:
            three = shown(*[data_url(drawing(85 + k)) for k in range(3)])
            asking = asyncio.create_task(client.post(CHAT, json={"messages": three, **QUIET}))
            await asyncio.to_thread(begun.wait, 60)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            go_on.set()

    asyncio.run(leave())
    assert ask(seer, shown(data_url(drawing(88)))).status_code == 200 and len(looked) == 2


def test_those_who_wait_for_the_tower_count_as_waiting(model, monkeypatch):
    """All that come at the same moment, and each of their answers."""
    engine = Engine(Runner(model, 8 << 20), {1}, [PAD_ID], Settings(16, max_waiting=4))
    server = Served(make_app(engine, TOKENIZER, ServerSettings(names=("seer",))), engine)
    engine.start()
    look = engine.runner.eyes._look
    monkeypatch.setattr(engine.runner.eyes, "_look", lambda picture: time.sleep(0.5) or look(picture))
    body = {"messages": shown(data_url(drawing(90))), "max_tokens": 1, "n": 2, **QUIET}
    answers = server.together(*[body] * 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers if answer.status_code == 429)
    engine.drain(0)


def drained(model, monkeypatch, seconds):
    """One request whose picture the tower still looks at when a drain begins, another that comes after it: their
    status codes, and whether the drain found that all were answered."""
    engine = Engine(Runner(model, 8 << 20), {1}, [PAD_ID], Settings(16))
    server = Served(make_app(engine, TOKENIZER, ServerSettings(names=("seer",))), engine)
    engine.start()
    begun, go_on, look = threading.Event(), threading.Event(), engine.runner.eyes._look
    monkeypatch.setattr(engine.runner.eyes, "_look", lambda one: begun.set() or (go_on.wait(60) and look(one)))

    async def both():
        async with server.client() as client:
            first, second = ({"messages": shown(data_url(drawing(k))), "max_tokens": 2, **QUIET} for k in (91, 92))
            asking = asyncio.create_task(client.post(CHAT, json=first))
            await asyncio.to_thread(begun.wait, 60)
            draining = asyncio.create_task(asyncio.to_thread(engine.drain, seconds))
            while engine.accepting:
                await asyncio.sleep(0.001)
            late = await client.post(CHAT, json=second)
            done, _ = await asyncio.wait([draining], timeout=0.2 if seconds is None else 60)
            assert bool(done) == (seconds is not None), "it waits for the tower, as long as it may"
            go_on.set()
            answer = await asking
            assert engine.pixels.bytes == 0 and not engine.waiting
            return answer.status_code, late.status_code, await draining

    return asyncio.run(both())


def test_a_drain_waits_for_pictures_that_are_looked_at(model, monkeypatch):
    assert drained(model, monkeypatch, None) == (200, 503, True)


def test_a_drain_waits_for_pictures_no_longer_than_it_may(model, monkeypatch):
    assert drained(model, monkeypatch, 0.1) == (503, 503, False)


def test_text_is_answered_while_pictures_are_decoded(seer, monkeypatch):
    """More pictures than there are threads for anything."""
    go_on = threading.Event()
    monkeypatch.setattr(picture_sources.PictureSources, "one", lambda *args: go_on.wait(60) and 1 / 0)

    async def both():
        async with seer.client(**ALICE) as client:
            body = {"messages": shown(data_url(drawing(1))), **QUIET}
            waiting = [asyncio.create_task(client.post("/tokenize", json=body)) for _ in range(64)]
            await asyncio.sleep(0.2)
            text = await asyncio.wait_for(client.post("/tokenize", json={"messages": [user("hi")]}), 30)
            go_on.set()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return text.status_code

    assert asyncio.run(both()) == 200


def test_features_that_have_no_room_are_left_to_the_engine(model):
    eyes = Eyes(model, 4 * 12 * model.cfg.hidden_size)
    _, pictures = show([PAD_ID, PAD_ID], [picture(1), picture(2)], PAD_ID)
    eyes.look_ahead(pictures)
    assert eyes.looked == 1 and eyes.unseen(pictures) and not eyes.unseen(pictures[:1])
    eyes.forget()
    assert eyes.unseen(pictures[:1]) and eyes.bytes == 0
