# Every command that a developer or CI needs. Tool versions are pinned here.

GO           ?= go
STATICCHECK  := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK  := golang.org/x/vuln/cmd/govulncheck@v1.9.0
GOLANGCI     := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GREMLINS     := github.com/go-gremlins/gremlins/cmd/gremlins@v0.6.0
# The number of the release that this source becomes. make release makes the release; any other
# build is a development version.
RELEASE      := 0.1.0
VERSION      ?= $(RELEASE)$(if $(filter release test-release,$(MAKECMDGOALS)),,-dev)
COMMIT       := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
LDFLAGS      := -s -w -X github.com/pdproxy/pdproxy/cmd.Version=$(VERSION) -X github.com/pdproxy/pdproxy/cmd.commit=$(COMMIT)
PACKAGES     := ./...
FUZZTIME     ?= 30s
# The race detector watches all code except the packages that decode, meter and compile Wasm
# guests: with it there, a guest takes ten times as long to load. These
# packages use no sync.Map and no other generic code of package sync. The linker
# keeps one copy of such code for the program, and a copy without the detector
# makes it report races that do not exist.
WAZERO       := github.com/tetratelabs/wazero/internal
UNWATCHED    := $(WAZERO)/engine/wazevo/backend/... $(WAZERO)/engine/wazevo/frontend $(WAZERO)/engine/wazevo/ssa $(WAZERO)/wasm/binary $(WAZERO)/leb128 ./abi/host/meter
RACE         := -race $(foreach p,$(UNWATCHED),-gcflags=$p=-race=false) -shuffle=on
SUITE        := $(GO) run ./internal/dev/suite
# The second tier has these packages below conformance, and these tests of conformance
# itself: they start many processes, or need root, the network, or other programs.
SECOND       := abi acme chaos costs deploy discovery fleet http1 kvevents plugins policies scaling security takeover
# The tests of these packages start the built program. The race detector would watch only the tests.
BUILT        := acme chaos deploy takeover
SECOND_TESTS := ^Test(Modes.*|Soak|Std|WorkerKilled|CoordinatorKilled)$$
# The first tier runs conformance and internal without the race detector. They are tools and
# simulated engines, and the detector takes five times the processor time. The second tier runs
# conformance and the simulated engines with the race detector.
UNRACED      := ./conformance/docs ./internal/...
FIRST         = $(filter-out %/conformance %/conformance/docs $(foreach p,$(SECOND),%/conformance/$p),$(shell $(GO) list ./... | grep -v /internal/))
# Some tests of these packages repeat less often with -short, which the first tier passes to
# all tests with the race detector. The second tier runs these packages without -short.
REPEATED     := ./plugins ./proxy/state/kvindex
# CI runs these tests of conformance/epp, without the subtests llm-d: CI does not have llm-d's sidecar.
GATEWAY_TESTS := ^Test(Texts|ClientLeaves|KilledPicker|Overload|Eviction|FullQueue|PrefillFails|StreamsBreak|Extension|Paths|Metadata|MetadataEvicted|Calls|StoppedPicker|HTTP2)$$/^[^l]
BENCHTIME    ?= 200ms
SOAK         ?= 10m
IDS          ?= 100000000
STREAMS      ?= 600000
MODE         ?= fleet
COVERAGE_MIN := 85
# Packages whose tests run the whole proxy with fake engines (proxytest/world), and so cover the packages below theirs.
WORLDS       := ./proxy ./proxy/attempt ./proxy/cleanup ./proxy/downstream ./proxy/epp ./proxy/exchange ./proxy/prompt ./proxy/websocket
# Packages of make mutants: rules without processes, sockets or waits, which their own tests cover.
MUTATED      := ./abi ./policies/kvaware ./proxy/admission ./proxy/connector ./proxy/cleanup ./proxy/state/conversation ./proxy/state/kvindex ./proxy/state/load ./proxy/tenant
MUTATIONS    := --invert-assignments --invert-logical --invert-loopctrl --remove-self-assignments
MUTANTS_MIN  := 60

.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# With -trimpath, as in a release, all packages would be compiled again: the tests build without it.
.PHONY: build
build: ## bin/pdproxy
	$(GO) build -ldflags "$(LDFLAGS)" -o bin/pdproxy ./cmd/pdproxy

.PHONY: demo
demo: build ## simulated engines and the proxy in one process
	bin/pdproxy demo

.PHONY: test
test: ## the first tier, for every change: unit tests under the race detector, every failure with every connector
	@$(SUITE) -split=6 -vet=off -shuffle=on -timeout=10m '-skip=$(SECOND_TESTS)' ./conformance -- -vet=off -shuffle=on -timeout=10m $(UNRACED) -- -vet=off $(RACE) -short -timeout=10m $(FIRST)

.PHONY: test-all
test-all: vet processes alone clients gateway ## the second tier: fleets, takeover, chaos, plugins, discovery, attacks, real clients, Envoy (root)

# The other steps need no vet of their own.
.PHONY: vet
vet:
	$(GO) vet $(PACKAGES)
	$(GO) vet -tags kubernetes ./conformance/discovery
	$(GO) vet -tags authors ./conformance/plugins

# The first tier runs the failures with every connector. Under the race detector the second tier
# runs them with these: one for each order of the legs, and one of each engine (modes_test.go).
# make modes MODE=single has every connector under the race detector.
.PHONY: processes
processes: export PDPROXY_CONNECTORS = vllm-nixl,sglang,trtllm
processes: # the second tier, under the race detector except the packages of BUILT
	@$(SUITE) -strict -split=6 $(RACE) -timeout=25m ./conformance -- -vet=off $(RACE) -timeout=25m ./internal/enginesim/... $(foreach p,$(filter-out $(BUILT) costs http1 security,$(SECOND)),./conformance/$p) $(REPEATED) -- -vet=off -p=1 -shuffle=on -timeout=25m $(foreach p,$(BUILT),./conformance/$p)

# The programs that costs, http1 and security test are processes of their own, which the race detector
# does not see. The other packages make other system calls without the detector, or run as root what
# the first tier may skip. The detector hides the memory of a compilation (abi/host/meter).
.PHONY: alone
alone: # the second tier without the race detector
	@$(SUITE) -strict -vet=off -shuffle=on -timeout=10m ./abi/host/meter ./conformance/costs ./conformance/http1 ./conformance/security ./proxy/upstream ./proxy/coordinator ./proxy/coordinator/fleet ./proxy/coordinator/link ./proxy/state/kvindex ./proxy/privatedir ./plugins/filter ./plugins/policy ./cmd/...

.PHONY: modes
modes: export PDPROXY_MODE = $(MODE)
modes: ## every scenario of conformance in MODE: fleet, hosts or single; not in CI, which runs the main ones
	@$(SUITE) -split=6 $(RACE) -timeout=25m '-skip=^Test(Modes.*|Soak)$$' ./conformance

.PHONY: clients
clients: build ## OpenAI clients for Go, Node and Python, curl, Chromium over HTTP/3
	cd conformance/clients && ./run.sh

.PHONY: gateway
gateway: build ## the endpoint picker behind a real Envoy: the part of make test-epp that CI runs (Python index)
	@$(GO) build -o build/suite ./internal/dev/suite
	@envoy=$$(conformance/epp/install.sh) && cd conformance/epp && ENVOY=$$envoy ../../build/suite -strict -count=1 -timeout=8m '-run=$(GATEWAY_TESTS)' .

.PHONY: cover
cover: ## coverage of abi, plugins and proxy, and the seeds of each fuzz target; fails below $(COVERAGE_MIN) %
	@mkdir -p build
	$(GO) test -cover -coverprofile=build/cover-own.out ./abi/... ./plugins/... ./proxy/...
	$(GO) test -coverpkg=./abi/...,./plugins/...,./proxy/... -coverprofile=build/cover-others.out ./cmd/... ./conformance/abi $(WORLDS)
	$(GO) run ./internal/dev/coverage -min $(COVERAGE_MIN) -profiles build/cover-own.out,build/cover-others.out abi plugins proxy

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME
	@for pkg in $$($(GO) list $(PACKAGES)); do \
	  for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
	    echo "$$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 50x $$pkg || exit 1; \
	  done; done

.PHONY: soak
soak: ## mixed load with engines killed, hung and restarted, for SOAK
	PDPROXY_SOAK=$(SOAK) $(GO) test -race -run '^TestSoak$$' -v -timeout 2h ./conformance

.PHONY: security
security: ## attacks of every kind on the built program, Chromium's too, then hostile load beside honest for SOAK (root)
	PDPROXY_SECURITY=long $(GO) test -count=1 -skip '^TestHostileSoak$$' -timeout 30m ./conformance/security
	PDPROXY_SECURITY=long PDPROXY_SECURITY_SOAK=$(SOAK) $(GO) test -count=1 -run '^TestHostileSoak$$' -v -timeout 2h ./conformance/security

.PHONY: fuzz-http1
fuzz-http1: ## STREAMS random HTTP/1.1 streams: the proxy accepts nothing that net/http or llhttp reads in another way (npm)
	HTTP1_STREAMS=$(STREAMS) $(GO) test -count=1 -run '^TestRandomStreams$$' -v -timeout 2h ./conformance/http1

.PHONY: ids
ids: ## IDS ids from 64 workers through fail-overs, clock steps and restarts, each looked up
	PDPROXY_IDS=$(IDS) $(GO) test -count=1 -run '^TestIDsOfAFleetAreUnique$$' -v ./conformance/discovery

.PHONY: chaos
chaos: ## every role of a fleet killed, stopped, cut off and slowed under load, etcd away for a minute (root, or user namespaces)
	PDPROXY_CHAOS=long $(GO) test -count=1 -run '^TestChaos$$' -v -timeout 30m ./conformance/chaos

.PHONY: bench
bench: build ## CPU per request and per event against peers, as ratios
	$(GO) run ./internal/dev/bench run -pdproxy bin/pdproxy

.PHONY: bench-peers
bench-peers: build ## install other proxies and routers, compare them with pdproxy, write docs/benchmarks.md (under an hour; PEERS='-only check -peers Envoy')
	$(GO) run ./internal/dev/bench peers -pdproxy bin/pdproxy $(PEERS)
	$(GO) run ./internal/dev/bench page

.PHONY: bench-check
bench-check: ## CPU of the working tree beside that of commit BASE, in turn; fails if a row is slower (two cores)
	@$(GO) build -o build/bench ./internal/dev/bench && build/bench check -base $(BASE)

.PHONY: bench-scale
bench-scale: build ## costs over the number of targets, models, conversations, streams and more, for docs/scale.md; ROW is a pattern of rows
	@$(GO) build -o build/bench ./internal/dev/bench && build/bench scale -pdproxy bin/pdproxy -only '$(ROW)'

.PHONY: test-real
test-real: build ## real vLLM engines on the CPU (Python index needed, not in CI)
	conformance/real/run.sh

.PHONY: test-continue
test-continue: build ## streams of real vLLM engines on the CPU that are killed, stopped and drained (Python index needed, not in CI)
	conformance/real/continue.sh plain
	conformance/real/continue.sh nixl

.PHONY: test-epp
test-epp: build ## the endpoint picker behind a real Envoy; LLMD_SIDECAR names llm-d's sidecar, LLMD_EPP its EPP (Python index needed, not in CI)
	ENVOY=$$(conformance/epp/install.sh) && cd conformance/epp && ENVOY=$$ENVOY $(GO) test -count=1 -timeout 20m .

.PHONY: bench-epp
bench-epp: build ## the endpoint picker beside llm-d's (LLMD_EPP names its program) behind a real Envoy: CPU, first byte, cache hits
	ENVOY=$$(conformance/epp/install.sh) && cd conformance/epp && ENVOY=$$ENVOY $(GO) test -count=1 -run '^$$' -bench . -benchtime 1x -timeout 30m .

.PHONY: test-manifests
test-manifests: ## deploy/gateway and the files of quickstart --out against their schemas (Go module proxy needed, not in CI)
	cd conformance/kubernetes/crds && $(GO) test -count=1 ./manifests
	cd conformance/quickstart && $(GO) test -count=1 .

.PHONY: test-page
test-page: build ## the dashboard in Chromium (needs chromium, not in CI); SCREENSHOTS=1 writes the pictures of the docs
	cd conformance/page && $(GO) test -count=1 -timeout 30m . $(if $(SCREENSHOTS),-screenshots -run 'Operator|Parked|Incident')

.PHONY: test-authors
test-authors: ## plugins in each language, with TinyGo TINYGO_VERSION too; a real registry and minisign (root needed, not in CI)
	$(GO) test -count=1 -timeout 20m -tags authors ./conformance/plugins -run 'Scaffold|RealRegistry|TinyGo'

.PHONY: test-operations
test-operations: ## dashboard, alerts and ScaledObjects with a real Prometheus, and OTLP (root and Debian's packages, not in CI)
	command -v promtool >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends prometheus; }
	cd conformance/operations && $(GO) test -count=1 -v -timeout 15m .

.PHONY: test-flags
test-flags: ## the commands of pdproxy quickstart against vLLM's own argument parser (Python index needed, not in CI)
	conformance/real/flags.sh

.PHONY: test-quickstart
test-quickstart: ## the quickstarts vllm-nixl and vllm-nixl-push as printed, with real vLLM engines on the CPU (not in CI)
	conformance/real/quickstart.sh

.PHONY: quickstart
quickstart: ## docs/quickstart from the table in the package quickstart
	$(GO) test ./quickstart -run=TestPages -update

# The tools of a release come from nested modules, which pin their versions.
TOOL := build/release
$(TOOL)/%: deploy/release/%/go.mod deploy/release/%/go.sum
	@mkdir -p $(TOOL)
	cd deploy/release/$* && $(GO) build -ldflags "-s -w" -o $(CURDIR)/$@ $$($(GO) list tool)

.PHONY: test-kubernetes
test-kubernetes: $(TOOL)/helm ## discovery and the Helm chart against a real kube-apiserver (root needed, not in CI)
	conformance/kubernetes/run.sh

# Without SNAPSHOT, goreleaser publishes the release of the git tag at HEAD.
SNAPSHOT ?= --snapshot

.PHONY: release
release: export VERSION := $(VERSION)
release: export COMMIT := $(COMMIT)
release: export SECONDS_OF_COMMIT = $(shell git log -1 --format=%ct)
release: export DATE_OF_COMMIT = $(shell TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ)
release: $(TOOL)/goreleaser $(TOOL)/syft $(if $(COSIGN_KEY),$(TOOL)/cosign) ## dist/: archives, .deb, .rpm, checksums, SBOMs, image and chart, as a snapshot; signed with COSIGN_KEY
	PATH="$(CURDIR)/$(TOOL):$$PATH" goreleaser release --clean $(SNAPSHOT) $(if $(COSIGN_KEY),,--skip=sign)
	@$(MAKE) --no-print-directory image chart $(if $(COSIGN_KEY),sign)

# goreleaser signs the checksums, which cover the files that goreleaser makes.
.PHONY: sign
sign: $(TOOL)/cosign # the archive of the image and the chart, with COSIGN_KEY
	@for file in dist/pdproxy_*_image.tar dist/pdproxy-*.tgz; do \
	  $(TOOL)/cosign sign-blob --yes --key="$(COSIGN_KEY)" --signing-config=deploy/release/cosign/offline.json --bundle="$$file.sigstore.json" "$$file" || exit 1; done

.PHONY: image
image: # the OCI image, from the binaries of dist/
	cd deploy/release/image && $(GO) run . -dist $(CURDIR)/dist -date $$(git log -1 --format=%ct)

.PHONY: chart
chart: $(TOOL)/helm ## the Helm chart, checked with every set of values, in dist/
	@mkdir -p dist
	@for values in deploy/helm/pdproxy/values.yaml deploy/helm/pdproxy/ci/*.yaml; do \
	  $(TOOL)/helm lint --quiet --strict -f $$values deploy/helm/pdproxy && \
	  $(TOOL)/helm template pdproxy -f $$values deploy/helm/pdproxy >/dev/null || exit 1; done
	$(TOOL)/helm package --version $(VERSION) --app-version $(VERSION) -d dist deploy/helm/pdproxy

.PHONY: test-release
test-release: export COSIGN_PASSWORD := test
test-release: $(TOOL)/cosign ## a signed release; its image, packages and archives installed and started (root and Debian's packages, not in CI)
	@mkdir -p build/test-release && rm -f build/test-release/cosign.*
	$(TOOL)/cosign generate-key-pair --output-key-prefix build/test-release/cosign
	@$(MAKE) --no-print-directory release COSIGN_KEY=$(CURDIR)/build/test-release/cosign.key
	conformance/release/run.sh

.PHONY: policies
policies: ## the built-in modules from their sources: policies/builtin.wasm and filters/stable_prefix.wasm, then tests
	$(GO) test -count=1 -run '^TestModuleIsItsSource$$|^TestFilterIsItsSource$$' ./conformance/policies -update
	$(GO) test ./policies/... ./filters/... ./conformance/policies

.PHONY: bench-wasm
bench-wasm: ## what a decision costs: native, built-in Wasm, guests in Go, C and Rust
	$(GO) test -run '^$$' -bench '^BenchmarkDecision$$' -benchtime $(BENCHTIME) ./conformance/policies

.PHONY: bench-kv
bench-kv: ## KV index: events a second, matches beside them, bytes a block; a whole decision over 64 ranks
	$(GO) test -run '^$$' -bench . ./proxy/state/kvindex ./proxy/engine/kvevents ./proxy/state/conversation
	$(GO) test -run '^$$' -bench '^BenchmarkRoute$$' ./conformance/policies

.PHONY: routing
routing: ## hits and evenness of kv_aware and pair_aware on variants of a real trace
	PDPROXY_ROUTING=long $(GO) test -count=1 -run '^TestVariantsAreEven$$' -v ./internal/replay

.PHONY: routing-tables
routing-tables: ## the tables of docs/concepts/routing.md: place policies on four public traces
	$(GO) test -run '^$$' -bench '^BenchmarkTables$$' -benchtime 1x -timeout 2h ./internal/replay

.PHONY: turn-tables
turn-tables: ## the tables of docs/concepts/routing.md: turns of two public traces
	$(GO) test -run '^$$' -bench '^BenchmarkTurnTables$$' -benchtime 1x -timeout 1h ./internal/replay

.PHONY: reference
reference: ## the generated pages of docs/reference
	$(GO) test -count=1 ./conformance/docs -update

.PHONY: proto
proto: ## the Go code of the messages between processes, from proxy/fleetpb/*.proto
	cd internal/dev/genproto && $(GO) run . ../../../proxy/fleetpb place.proto fleet.proto

# NO_MKDOCS_2_WARNING: the theme warns of the next MkDocs; docs/requirements.txt pins this one.
.PHONY: docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: reference build/docs-tools/.installed ## the site of docs in build/site; fails if a link is dead
	build/docs-tools/bin/mkdocs build --strict --quiet
	@echo "The site is in build/site. To read it with its search, run:"
	@echo "  python3 -m http.server --bind 127.0.0.1 --directory $(CURDIR)/build/site 8000"
	@echo "and open http://127.0.0.1:8000"

.PHONY: test-site
test-site: docs ## the search of the site finds how-tos first (node)
	node conformance/docs/search.js build/site

build/docs-tools/.installed: docs/requirements.txt
	python3 -m venv build/docs-tools
	build/docs-tools/bin/pip install --quiet --no-deps --requirement docs/requirements.txt
	touch $@

.PHONY: scaling
scaling: ## the plots of docs/concepts/scaling.md: engines scaled by the proxy's metrics
	$(GO) test -count=1 -run '^TestScaling$$' -v ./conformance/scaling -args -plots $(CURDIR)/docs/images

.PHONY: test-docs
test-docs: build ## every shell block of the documents that needs no GPU, and the reference against the built program (root, or user namespaces)
	PDPROXY_DOCS=$(CURDIR)/bin/pdproxy $(GO) test -count=1 -run '^TestShellBlocks$$' -v -timeout 8m ./conformance/docs
	cd conformance/docs/openapi && PDPROXY_DOCS=$(CURDIR)/bin/pdproxy $(GO) test -count=1 .

.PHONY: notices
notices: ## cmd/THIRD_PARTY_NOTICES.md from the modules that are linked in
	$(GO) test -count=1 -run '^TestNotices$$' ./conformance -args -update-notices

.PHONY: audit
audit: ## checksums and known vulnerabilities of modules, security rules of gosec, the attacks of conformance/security
	$(GO) mod verify
	@echo "govulncheck ./..."; \
	if out=$$($(GO) run $(GOVULNCHECK) $(PACKAGES) 2>&1); then echo "$$out"; \
	elif echo "$$out" | grep -qE 'fetching vulnerabilities|vuln\.go\.dev|no such host|connection refused|i/o timeout'; then \
	  echo "NOT CHECKED: the database of known vulnerabilities (vuln.go.dev) cannot be reached from here"; \
	else echo "$$out"; exit 1; fi
	$(GO) run $(GOLANGCI) run --enable-only gosec
	$(GO) test -count=1 -timeout 10m ./conformance/security

.PHONY: lint
lint: ## staticcheck and golangci-lint
	$(GO) run $(STATICCHECK) $(PACKAGES)
	$(GO) run $(GOLANGCI) run

.PHONY: check
check: vet lint ## all that must hold before a commit lands
	@files=$$(gofmt -l $$(git ls-files '*.go')); test -z "$$files" || { echo "$$files"; echo "run gofmt -w ."; exit 1; }
	$(GO) mod tidy -diff
	cd conformance/clients && $(GO) mod tidy -diff
	cd conformance/kubernetes && $(GO) mod tidy -diff
	cd conformance/operations && $(GO) mod tidy -diff
	cd conformance/docs/openapi && $(GO) mod tidy -diff && $(GO) vet .
	cd conformance/kubernetes/crds && $(GO) mod tidy -diff
	cd conformance/epp && $(GO) mod tidy -diff && $(GO) vet .
	cd conformance/page && $(GO) mod tidy -diff
	cd conformance/quickstart && $(GO) mod tidy -diff
	cd conformance/acme/pebble && $(GO) mod tidy -diff
	cd deploy/release/image && $(GO) mod tidy -diff
	$(GO) build $(PACKAGES)
	GOARCH=arm64 $(GO) build $(PACKAGES)
	CGO_ENABLED=0 GOOS=darwin GOARCH=arm64 $(GO) vet ./cmd/... # releases have it
	CGO_ENABLED=0 GOOS=darwin GOARCH=arm64 $(GO) build ./cmd/...
	@test -z "$$(git status --porcelain)" || { git status --short; echo "the tree is not clean"; exit 1; }

# gremlins copies the module and changes the copy. Only code that the tests of its own package
# reach is changed. Without -count=1, a cached result would make the limit of a run too short.
.PHONY: mutants
mutants: ## faults in MUTATED, one at a time; fails if tests notice below $(MUTANTS_MIN) % in a package (weekly, not in CI)
	@failed=; for pkg in $(MUTATED); do echo "$$pkg"; \
	  GOFLAGS=-count=1 $(GO) run $(GREMLINS) unleash $(MUTATIONS) --workers 1 --timeout-coefficient 20 --output-statuses lt --threshold-efficacy $(MUTANTS_MIN) $$pkg || failed="$$failed $$pkg"; \
	done; test -z "$$failed" || { echo "below $(MUTANTS_MIN) %:$$failed"; exit 1; }
