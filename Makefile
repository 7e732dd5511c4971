# make demo: build the speaking demo in int4, speak a sentence, clone a voice.  make test: everything that CI runs.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
DEMO_BUILD := onnx/demo_cpu_int4
SENTENCE ?= Happy tiger travel under green mountain.
VOICE ?= female

.PHONY: demo test coverage fuzz soak docs clean

$(VENV)/.built: requirements.txt requirements-run.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/.tested: $(VENV)/.built requirements-dev.txt
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@

demo: $(VENV)/.built
	$(PY) optimize.py --checkpoint demo --device cpu --precision int4 --output $(DEMO_BUILD)
	mkdir -p out
	$(PY) inference.py --model-path $(DEMO_BUILD) --text "$(SENTENCE)" --seed 1 --out out/demo.wav
	$(PY) inference.py --model-path $(DEMO_BUILD) --text "$(SENTENCE)" --seed 1 --out out/demo_clone.wav \
		--ref-audio demo/voices/$(VOICE).wav --ref-text "$$(cat demo/voices/$(VOICE).txt)"

test: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

# The same tests; says which lines of voxport/run none of them reaches, and fails under 95 %.
coverage: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest -n 2 --dist loadfile
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage json --quiet -o coverage.json
	$(PY) benchmarks/line_coverage.py coverage.json benchmarks/line_coverage.json
	$(PY) -m coverage report

# Damaged input for every reader. CASES and SEED may be given; a fault prints the command that repeats it.
CASES ?= 20000
SEED ?= 0
fuzz: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(PY) -m fuzz --cases $(CASES) --seed $(SEED) --out benchmarks/fuzz.json

# Two thousand utterances in one process: does it grow?
soak: $(VENV)/.built
	$(PY) optimize.py --checkpoint demo --precision int4 --output $(DEMO_BUILD)
	$(PY) benchmarks/soak.py --build $(DEMO_BUILD) --out benchmarks/soak.json

clean:
	rm -rf out $(DEMO_BUILD) .pytest_cache .hypothesis .coverage .coverage.* coverage.json

# The example reports under docs/: the demo's int4 and fp32 builds side by side, with listeners. WHISPER is a model name or folder.
WHISPER ?= tiny.en
docs: $(VENV)/.built
	$(PY) -m pip install --quiet -r requirements-listen.txt
	$(PY) optimize.py --checkpoint demo --precision int4 --output $(DEMO_BUILD)
	$(PY) optimize.py --checkpoint demo --precision fp32 --output onnx/demo_cpu_fp32
	$(PY) eval.py --model-path $(DEMO_BUILD) --compare onnx/demo_cpu_fp32 --reference demo --frames 120 --asr $(WHISPER) \
		--voices demo/voices --ref-audio demo/voices/female.wav --ref-text "$$(cat demo/voices/female.txt)" \
		--html docs/eval_demo.html --output docs/eval_demo.json > docs/eval_demo.txt
