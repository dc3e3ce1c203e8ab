"""Images in messages of OpenAI's form, over an engine that says what a test wrote down."""

import base64

from nanodag.data.picture_problems import count_shapes
from nanodag.host.images import FOLDER, digests_in, keep
from tests.api.scripted import Scripted, app_of, ask, chat, model_of
from tests.model.vision_models import write_processor


def test_an_image_of_a_message_reaches_the_engine_as_ids_that_spell_it(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "images"))
    write_processor(tmp_path)
    engine = Scripted([*b"2"])
    app = app_of(model_of(tmp_path, engine, context=100, reads_images=True))
    content = count_shapes()[0]["images"][0]
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "How many?"}]
    reply = chat(app, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "2"
    assert [digest for _, _, digest in digests_in(engine.asked[0].input_ids)] == [keep(content)]
    ids = list(engine.asked[0].input_ids)
    assert ask(app, "/detokenize", {"tokens": ids[-3:]}).status_code == 200
    named = ask(app, "/tokenize", {"messages": [{"role": "user", "content": parts}], "return_token_strs": True})
    assert named.status_code == 200 and len(named.json()["token_strs"]) == len(ids)
    text_alone = app_of(model_of(tmp_path, engine, context=100))
    assert ask(text_alone, "/v1/completions", {"prompt": ids}).status_code == 400
    parts[0]["image_url"]["url"] = "http://localhost/a.png"
    refused = chat(app, messages=[{"role": "user", "content": parts}])
    assert refused.status_code == 400 and "only data:image/" in refused.text
