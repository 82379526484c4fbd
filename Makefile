# Drover: `make help` lists the targets. Tests, demo and bench use real block devices and mounts: they need root.
SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
GO          ?= $(or $(shell command -v go),/usr/local/go/bin/go)
BIN         := bin/drover
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS     := -s -w -X drover.io/drover/driver/cli.Version=$(VERSION)
CONTROLLER_GEN := $(GO) run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0
GOLANGCI       := nice $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOTESTSUM      := $(GO) run gotest.tools/gotestsum@v1.13.0
# The tests run this program; without the variable each package builds its own.
test test-all sanity: export DROVER_BINARY ?= $(abspath $(BIN))
# Of one package: one that hangs must say where before whoever runs all of them loses patience.
TESTFLAGS   ?= -timeout 45m
# `make check` vets; debug information would take a third of the time to link.
TESTBUILD   := -vet=off -ldflags='-s -w'
# Most tests wait for disks, processes and times: three packages go on at once on two cores, too.
PACKAGES    ?= $(shell n=$$(nproc); echo $$((n > 3 ? n : 3)))
# Those that take longest begin first.
LONGEST     := ./sanity/cluster ./sanity ./replicas ./imagestore ./replicas/stack ./replicas/peer \
  ./imagestore/importer ./imagestore/archive ./driver/kubeapi ./replicas/protocol
TESTS       ?= $(LONGEST) ./...
KILLS       ?= 200
MODEL       ?= 3h
FUZZTIME    ?= 60s
SCHEDULES   ?= 500
LOSSES      ?= 250
VOLUMES     ?= 250

# Debian's Go does not fetch the version that go.mod names unless told so.
export GOTOOLCHAIN ?= auto
# Without its folder in what is compiled, each clone of the repository shares the cache of Go with the others.
export GOFLAGS := -trimpath $(GOFLAGS)

.DEFAULT_GOAL := help
.PHONY: mutants demo-cluster test-faults test-many test-all quick help setup build release test race lint check generate sanity test-crash test-model bench fuzz demo man cluster clean need-root setup-all walls fmt-check

help: ## show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

build: ## build bin/drover
	@# The flags that compile are those of the tests, so that both share what is compiled.
	$(GO) build -buildvcs=false -ldflags '$(LDFLAGS)' -o $(BIN) .

release: ## build bin/drover as it is shipped: static, and the same bytes everywhere
	CGO_ENABLED=0 $(GO) build -buildvcs=false -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) .

setup: ## install what is missing of the tools below (Debian)
	@.ci/setup

setup-all: ## setup, and what only test-all needs
	@.ci/setup all

quick: ## the pure tests, in less than a minute (no root)
	@# A package whose tests need a server would be linked for nothing.
	$(GO) test -short -p $(PACKAGES) $(TESTBUILD) -timeout 5m $$($(GO) list ./... | grep -vxF \
	  "$$(grep -rl --include='*_test.go' 'suite.SystemMain()' . | xargs -n 1 dirname | sed 's|^\.|drover.io/drover|')")

test: need-root setup build ## run every deterministic test (root; real devices, mounts and processes; installs what is missing)
ifdef RERUNS
	@# RERUNS=FILE runs each failed test once more and lists those tests in FILE. A package that does not build, panics or
	@# exceeds its time fails at once; more than ten failed tests are no matter of luck.
	$(GOTESTSUM) --format standard-quiet --rerun-fails=1 --rerun-fails-max-failures=10 --rerun-fails-run-root-test \
	  --rerun-fails-report $(RERUNS) --packages '$(TESTS)' -- -p $(PACKAGES) $(TESTBUILD) $(TESTFLAGS)
else
	$(GO) test -p $(PACKAGES) $(TESTBUILD) $(TESTFLAGS) $(TESTS)
endif

test-all: need-root setup-all build ## test, test-crash, test-model, test-faults, test-many and fuzz, from random seeds (a day)
	DROVER_TEST=all $(GO) test -p $(PACKAGES) -timeout 4h -count=1 $(TESTS)
	$(MAKE) test-crash test-model test-faults test-many fuzz

race: need-root setup ## the same under the race detector (slow; needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race -timeout 60m ./...

sanity: need-root setup build ## csi-sanity and the stories of users, verbosely
	$(GO) test $(TESTFLAGS) -count=1 -v ./sanity/...

test-crash: need-root setup ## kill -9 of the data process under verified load, KILLS=200 times; scarce memory
	DROVER_TEST=all DROVER_KILLS=$(KILLS) DROVER_OUTCOMES=8 $(GO) test -timeout 60m -count=1 -v -run 'Kill|PowerLoss|DeadOwner' ./replicas/device ./replicas/stack
	DROVER_TEST=all DROVER_KILLS=$(KILLS) DROVER_SECONDS=120 $(GO) test -timeout 60m -count=1 -v -run 'TestStories/(killed|scarce)' ./sanity

test-model: need-root setup ## random programs against byte-exact models, with kills and losses of power, for MODEL=3h
	DROVER_TEST=all DROVER_MODEL=$(MODEL) $(GO) test -timeout 0 -count=1 -v -run Model ./replicas/stack ./sanity

test-faults: need-root setup build ## random faults of a cluster and of replicas under verified load, SCHEDULES=500 times; LOSSES=250 losses of power
	DROVER_TEST=all DROVER_FAULTS=$(SCHEDULES) $(GO) test -timeout 12h -count=1 -run Faults ./replicas/peer ./replicas/engine
	DROVER_TEST=all DROVER_BINARY=$(abspath $(BIN)) DROVER_SCHEDULES=$(SCHEDULES) $(GO) test -timeout 12h -count=1 -v -run TestFaults ./sanity/cluster
	DROVER_TEST=all DROVER_BINARY=$(abspath $(BIN)) DROVER_POWER=$(LOSSES) $(GO) test -timeout 12h -count=1 -v -run TestPowerLoss ./sanity/cluster

test-many: need-root setup build ## VOLUMES=250 with three replicas over ten images, a node that dies and comes back
	DROVER_TEST=all DROVER_BINARY=$(abspath $(BIN)) DROVER_MANY=$(VOLUMES) $(GO) test -timeout 3h -count=1 -v -run TestManyVolumes ./sanity/cluster

mutants: need-root setup ## take each guard of the data path out in turn: a test must notice (an hour)
	nice $(GO) run ./sanity/mutants $(MUTANTSFLAGS)

fuzz: ## run every fuzz test for FUZZTIME=60s
	@grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r f; do \
	  for t in $$(grep -oE '^func Fuzz[A-Za-z0-9_]*' "$$f" | cut -c6-); do \
	    echo "== $$t in $$(dirname "$$f")"; \
	    $(GO) test -run '^$$' -fuzz "^$$t\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x "$$(dirname "$$f")" || exit 1; \
	  done; done

bench: need-root setup build ## measure against a plain file and the kernel's loop device; LONG=1: longer rounds, more of them; writes bench/out.json
	$(GO) run ./bench -drover $(BIN) -out bench/out.json $(if $(LONG),-long) $(BENCHFLAGS)

man: ## the man pages of all commands, in man/
	$(GO) run ./driver/man man

demo: need-root setup ## the tour: images, volumes, kill -9 (installs what is missing; root)
	@demo/run

cluster: need-root setup build ## a cluster of three machines on this one to play with; Ctrl-C removes it
	@$(GO) build -o bin/play ./sanity/cluster/play && exec bin/play -drover $(BIN)

demo-cluster: need-root setup build ## three machines on this one, a volume with three replicas, machines lost under load
	@$(GO) build -o bin/tour ./sanity/cluster/tour && exec bin/tour -drover $(BIN)

lint: ## golangci-lint (built on first use, which takes minutes)
	$(GOLANGCI) run ./...

walls: ## who may import whom
	$(GO) test -count=1 -run 'TestWalls' ./sanity

fmt-check:
	@out=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$out" ]; then echo "gofmt these: $$out" >&2; exit 1; fi

generate: ## deep copies and CRDs from the types in api/
	$(CONTROLLER_GEN) object crd paths=./api/... output:crd:dir=api/crds

check: fmt-check ## gofmt, vet, golangci-lint, walls, generated files up to date
	$(GO) vet ./...
	$(MAKE) lint walls
	@before=$$(cat api/zz_generated.deepcopy.go api/crds/* | sha256sum); $(MAKE) generate; \
	 after=$$(cat api/zz_generated.deepcopy.go api/crds/* | sha256sum); \
	 if [ "$$before" != "$$after" ]; then echo "api/ was not generated anew: commit what 'make generate' wrote" >&2; exit 1; fi

clean: ## remove what the build made
	rm -rf bin bench/out.json

need-root:
	@if [ "$$(id -u)" != 0 ]; then echo "this needs root (block devices and mounts): sudo make $(MAKECMDGOALS)" >&2; exit 1; fi
