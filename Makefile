# Exitless: the commands a person needs. `make help` lists them.
export EXITLESS_COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

LAB := target/release/exitless-lab
REPORT := target/report

.PHONY: help setup setup-clients setup-debian build demo demo-wide test check clients fuzz bench-vtd bench-pviommu bench-pviommu-native bench-dma bench-dma-docs bench-serve bench-serve-old bench-serve-net bench-serve-net-docs bench-serve-lab bench-serve-net-lab bench-serve-net-lab-docs bench-image bench-swap bench-swap-figures bench-swap-native bench-assign bench-assign-native bench-assign-docs bench-worker eli eli-soak vfio debian soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:
	@./scripts/setup.sh

# Programs that some tests need and are skipped without.
setup-clients: setup
	@./scripts/setup.sh clients

build: setup ## the programs (exitless, exitless-lab) and the micro-hypervisor, in target/release
	cargo build --release --quiet -p exitless -p exitless-lab
	@./scripts/hypervisor.sh

demo: build ## a stock Linux guest with no IOMMU, trap, logged and shared, strict and lazy, and as `run` has it without flags: exits counted side by side
	$(LAB) demo --report $(REPORT)/demo.json

demo-wide: build ## the same for requests that meet a guest awake: a disk of 100 µs, read and written 32 deep, and UDP -> target/report/demo-wide.json
	$(LAB) demo --wide --report $(REPORT)/demo-wide.json

test: setup-clients ## all tests, suite by suite, with the seconds and the budget of each: crates natively, then clients of the daemon and whole guests in the lab (with the program this has built)
	@./scripts/suites.sh
	@echo "test: not run here: tests of dma-bench, of dma-linux, of dma-peers, of dma-soak, of dma-lines and of what fuzz targets found, 3*10^7 operations of dma-soak, loom and shuttle models, some mutants, Miri, builds without std, fuzz targets (make check); all mutants, 10^9 operations, long runs (make soak)"

check: setup ## format, lints, documentation, loom and shuttle models, mistakes that tests must find (3 minutes of them, others at each commit), the assertion of answers in `vio`, builds without std, tests of what `dma-map` is measured and compared with and of what fuzz targets found, 3*10^7 operations of every allocator and policy, Miri where it is, licences, each fuzz target for 30 s
	cargo fmt --check
	@./scripts/words.sh
	@./scripts/words-test.sh
	cargo clippy --release --workspace --all-targets --quiet -- -D warnings
	@./scripts/hypervisor.sh check
	cargo clippy --release -p dma-lines --features probe --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps --quiet
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet -p sidecore --lib --release model
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet -p dma-map --lib --release model
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet -p iova --lib --release model
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet -p dma-peers --lib --release model
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --quiet -p worker-area --lib --release model
	RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test --quiet -p iova -p dma-map -p dma-peers --release --test schedules
	cargo run --release --quiet -p mutants -- --sample 180
	cargo test --release --quiet --config profile.release.package.vio.opt-level=0 --config profile.release.package.vio.debug-assertions=true -p vio --lib body::tests
	@./scripts/no-std.sh
	cargo test --release --quiet -p dma-bench -p dma-linux -p dma-peers -p dma-soak -p fuzz
	cargo run --release --quiet -p dma-soak -- --operations 30000000 --quiet
	@./scripts/soak-test.sh
	cargo test --release --quiet -p dma-lines --features probe
	@if cargo miri --version >/dev/null 2>&1; then cargo miri test --quiet -p dma-map --test threads; \
	else echo "check: skipped Miri: not installed (rustup +nightly component add miri; stable toolchains have none)"; fi
	@echo "check: skipped Kani: no crate here has a harness for it; loom models and property tests stand in its place"
	@if command -v cargo-deny >/dev/null; then cargo deny --log-level error check licenses bans sources; \
	else echo "check: skipped cargo deny: not installed (cargo install --locked cargo-deny)"; fi
	@./scripts/fuzz.sh

clients: setup-clients build ## other people's programs on `exitless serve`, disks and network devices, plain and behind an IOMMU, each verified: QEMU 7.2 and 10, user-mode Linux, DPDK; those in namespaces need root; half an hour -> target/report/clients.json
	$(LAB) selftest --clients --report $(REPORT)/clients.json

fuzz: setup ## the fuzz targets, FUZZ_SECONDS (30) each
	@./scripts/fuzz.sh

bench-vtd: setup ## the IOMMU core natively: translate, drain, reaction time -> target/report/vtd.json
	cargo build --release --quiet -p vtd-bench
	@old=$$(./scripts/old.sh vtd-case); ./target/release/vtd-bench --report $(REPORT)/vtd.json $${old:+--old "$$old"}

bench-pviommu: build ## requests, kicks and exits of reads and of the network behind the paravirtual IOMMU: Linux's driver polled and trapped, ours by policy, beside VT-d, no IOMMU and the models of the policies; how long a released buffer can be reached; page faults of the sidecore by hint, bounce buffers; one list of the specification's cases against ours and QEMU's; in the lab: 40 minutes on 2 idle CPUs -> target/report/pviommu.json, target/report/pviommu.traces/
	$(LAB) pviommu-lab --report $(REPORT)/pviommu.json
	cargo run --release --quiet -p dma-bench -- --replay $(REPORT)/pviommu.json

bench-pviommu-native: setup ## the paravirtual IOMMU natively: requests polled and trapped, translate; two idle CPUs -> target/report/pviommu-native.json
	cargo run --release --quiet -p pviommu-bench -- --report $(REPORT)/pviommu-native.json

bench-dma: setup ## IOVA allocation and DMA mapping beside Linux's own code (built in the cache from Debian's kernel source) and other peers: 12 minutes on 2 idle CPUs -> target/report/dma.json, target/report/dma/
	linux=$$(./scripts/linux-iova.sh); EXITLESS_LINUX_IOVA="$$linux" cargo run --release --quiet -p dma-bench -- --report $(REPORT)/dma.json
	cargo run --release --quiet -p dma-lines --features probe -- --report $(REPORT)/dma-lines.json --into $(REPORT)/dma.json

bench-dma-docs: ## docs/dma-results.md from the figures of the last bench-dma
	cargo run --release --quiet -p dma-bench -- --again --report $(REPORT)/dma.json --docs docs/dma-results.md

bench-serve: build ## block devices for other VMMs, beside qemu-storage-daemon, and SPDK if SPDK= names a directory with a build of it: 30 minutes -> target/report/serve.json
	cargo run --release --quiet -p serve-bench -- serve-bench --report $(REPORT)/serve.json $(if $(SPDK),--spdk "$(SPDK)")

bench-serve-old: build ## block devices for other VMMs, beside this program of an old commit: six rows, 11 rounds in turns, 5 minutes -> target/report/serve-old.json
	@old=$$(./scripts/old.sh exitless); cargo run --release --quiet -p serve-bench -- serve-bench --only pairs --repetitions 11 --report $(REPORT)/serve-old.json --beside "$$old serve {blocks} --cpu {cpu} --idle {idle}"

# Each section alone takes less than two minutes: `--only split`, and so on (`vhost-net help serve-bench`).
bench-serve-net: build ## network ports for other VMMs, beside DPDK's vhost (testpmd; packages dpdk and dpdk-dev) where it is installed: five minutes on 2 idle CPUs -> target/report/serve-net.json, docs/serve-net-results.md
	cargo run --release --quiet -p net-bench -- serve-bench --report $(REPORT)/serve-net.json --docs docs/serve-net-results.md

bench-serve-net-docs: setup ## docs/serve-net-results.md from the figures of the last bench-serve-net
	cargo run --release --quiet -p net-bench -- docs --report $(REPORT)/serve-net.json --docs docs/serve-net-results.md

bench-serve-lab: build ## exits per request of 1, 2, 4, 7 guests on one `exitless serve` -> target/report/serve-lab.json
	$(LAB) serve-lab --report $(REPORT)/serve-lab.json

bench-serve-net-lab: build ## exits per packet of 1, 2, 4, 7 guests whose network one core of `exitless serve` moves, polling, notified and adaptive, and the kernel's vhost-net; frames of a MiB over TAP; pings behind a guest's IOMMU; in the lab: 20 minutes on 2 idle CPUs -> target/report/serve-net-lab.json, docs/serve-net-lab-results.md
	$(LAB) serve-net-lab --report $(REPORT)/serve-net-lab.json --docs docs/serve-net-lab-results.md

bench-serve-net-lab-docs: build ## docs/serve-net-lab-results.md from the figures of the last bench-serve-net-lab
	$(LAB) serve-net-lab --again --report $(REPORT)/serve-net-lab.json --docs docs/serve-net-lab-results.md

bench-swap-native: setup ## the swapper beside the bare system calls: a fault, batches out and in, markers, bytes a page; a minute on 2 idle CPUs -> target/report/swap-native.json
	cargo run --release --quiet -p swap-bench -- --report $(REPORT)/swap-native.json

bench-image: setup-clients ## what barriers cost a qcow2 image: 4 KiB random writes, new clusters or not, on this file system -> target/report/disk-image.json
	cargo run --release --quiet -p disk-image --example barriers -- target

bench-swap: build ## what guests with too little memory move, in the lab: the host's swap, a balloon, the pager with and without its parts, three rounds; then bench-swap-native: 45 minutes -> target/report/swap.json
	status=0; $(LAB) swap-lab --report $(REPORT)/swap.json || status=$$?; \
	cargo run --release --quiet -p swap-bench -- --report $(REPORT)/swap-native.json --into $(REPORT)/swap.json; exit $$status

bench-swap-figures: build ## what such guests move by memory allowed, by program (compiler, compressor, collector), and four at once; what the pager knows of their page caches; in the lab, one round, 90 minutes at most -> target/report/swap-figures.json, target/report/swap/
	$(LAB) swap-figures --report $(REPORT)/swap-figures.json

bench-worker: setup ## a disk whose device model is a process of its own, natively, beside the same disk in its owner's process: requests a second, CPU of both processes, copies, wake-ups; a minute on 2 idle CPUs, 3 for a guest's vCPU -> target/report/worker.json
	cargo run --release --quiet -p worker-bench -- --report $(REPORT)/worker.json

bench-assign-native: setup ## cycles of a map and an unmap for an assigned device, the unit, the shadow and the call apart; a minute on idle CPUs -> target/report/assign-native.json
	cargo run --release --quiet -p assign-bench -- --report $(REPORT)/assign-native.json

bench-assign: build ## an assigned NVMe drive and network card, in the lab: exits, VFIO calls, pages pinned and stale mappings, by the guest's policy, the host's (changed live) and register mode, one boot each, and all memory pinned; rogue DMA; before it bench-assign-native: 45 minutes -> target/report/assign.json, docs/assign-results.md
	cargo run --release --quiet -p assign-bench -- --report $(REPORT)/assign-native.json
	$(LAB) assign-lab --native $(REPORT)/assign-native.json --report $(REPORT)/assign.json --docs docs/assign-results.md

bench-assign-docs: build ## docs/assign-results.md from the figures of the last bench-assign
	$(LAB) assign-lab --again --report $(REPORT)/assign.json --docs docs/assign-results.md

eli: build ## exits of an assigned NVMe controller's interrupts under the micro-hypervisor: four modes, two stock kernels, by rate, behind an IOMMU; each attack in each mode without its defence, with it, and calm; under 20 minutes -> target/report/eli.json
	$(LAB) eli --all --reads 20000 --report $(REPORT)/eli.json

eli-soak: build ## twenty rounds of the modes, each attack five times in each mode, and 200,000 interrupts: two hours -> target/report/eli-soak.json
	$(LAB) eli --soak --report $(REPORT)/eli-soak.json

vfio: setup ## the NVMe driver in user space: 100,000 verified blocks under each of six policies and DMA where it may not be, behind an emulated VT-d in the lab: 2 minutes
	EXITLESS_LAB=1 cargo test --release --quiet -p lab --test lab -- --ignored --nocapture --exact vfio::a_hundred_thousand_blocks_under_each_policy

# What makes the Debian root.
setup-debian: setup
	@./scripts/setup.sh debian

debian: setup-debian build ## a stock Debian 12 (systemd, generic kernels 6.1 and 6.12) on a disk behind VT-d or a virtio-iommu: raw and qcow2, strict and lazy, verified by fio, rebooted 5 times, powered off by SIGTERM; in the lab, 12 minutes and 5 GB of disk
	$(LAB) selftest --debian

soak: setup-clients setup-debian ## the long runs; with SOAK_MINUTES=N short cases of them, those that were run longest ago, for so long (scripts/soak.sh). Whole, resumable at the same commit: DMA_SOAK_OPS (10^9) operations of IOVA allocators and mapping policies, twenty self-tests, a stock Debian in 15 cases (15 minutes), daemon killed 35 times, 5-minute verified I/O polling and adaptive, 16 vCPUs, ELF kernels, verified pages of guests with too little memory (8 minutes each), forced sleeps (resumable so far), 100,000 verified blocks by a driver in user space under each policy, guests with devices of the emulated host (three register modes, four policies, reset and reboot, 20 kills, memory reclaimed under load; 30 minutes), every mistake that a test must find, BARRIER_OPERATIONS (10^8) with cores stopped anywhere, EPISODES (2000) of storage that misbehaves natively and LAB_EPISODES (50) in the lab, SWAP_EVENTS (10^8) of the swapper's model, SWAP_SECONDS (300) of its threads, an hour of each fuzz target
	@./scripts/soak.sh

clean: ## removes everything built; what the lab downloaded is in the cache that `exitless-lab lab --help` names
	rm -rf target
