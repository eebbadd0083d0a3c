//! The program inside the test guest. It prints one line per result on standard output,
//! `key=value`, so that a reader finds it among kernel messages; errors go to standard error. Exit
//! status: 0 if all is verified, 1 if not, 2 for a malformed command line.

mod dma_rogue;
mod failure;
mod late;
mod options;
mod steps;
mod windows;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use failure::Failure;
use options::Options;
use steps::Steps;
use workload::BLOCK;
use workload::collect::{self, CollectConfig};
use workload::compile::{self, CompileConfig};
use workload::compress::{self, CompressConfig};
use workload::device::{self, Buffer};
use workload::episodes::EpisodesConfig;
use workload::held::{self, Blocks, HeldAction, HeldConfig};
use workload::marker::Markers;
use workload::mixed::{self, Event, MixedConfig};
use workload::pattern;
use workload::sequential::{self, SequentialConfig};
use workload::verify::{self, VerifyConfig};

const HELP: &str = "\
workload: the program inside the test guest

  workload reads DEV [--count 400] [--warmup 120] [--windows 1] [--random SEED] [--no-markers] [--in-place] [--pause-us US]
                 [--buffers 1] [--step]
      Direct 4 KiB reads, one at a time; each window of COUNT reads lies between two markers. What is read is kept and summed
      behind the window; with --in-place it is summed where it is read to, and a byte of it changed, so that one page is touched.
      With --buffers they go to that many pages in turn: warm up twice as many, so that a mapping of each has been made.
      With --pause-us the processor computes that long before each of them.
      Block numbers ascend, or are chosen by the seed.
      Prints after each window: reads window=I of=WINDOWS; with --step it waits for a line of standard input then.
      Prints at the end: reads ok count=… bytes=… fnv=CHECKSUM (the windows only, in order)
  workload deep DEV [--depth 32] [--count 400] [--warmup 120] [--windows 1] [--seed 1] [--write] [--no-markers]
      Direct 4 KiB reads, or writes, by DEPTH threads, one each at a time, in the order of blocks (64 MiB of them at most); each
      window of COUNT answered requests lies between two markers. What is read is compared with the pattern, what is written is the
      pattern.
      Prints at the end: deep ok count=… (the windows only)
  workload late DEV --limit-ms MS [--buffers 50] [--rounds 20] [--step-ms MS/8]
      For a disk that touches buffers again which it has given back, when block 8 or 9 is read (a fault of exitless-lab run,
      diskN:late=MS). Each round reads a block into each of so many pages, one at a time, and from then on block 8 every STEP
      milliseconds, until MS have passed since the last page was read to; a moment later block 9. Looks which pages the disk has changed meanwhile.
      Prints at the end: late ok rounds=… buffers=… triggers=… changed=… (pages, of all triggers)
                         changed_at_limit=… (of the last one of each round)
  workload mixed DEV --seconds S [--seed 1] [--depth 8] [--skip BLOCKS] [--trim]
                 [--stall-ms MS] [--progress-ms MS]
      Verified reads, writes and flushes by DEPTH threads; destroys the content, except for the first
      4 KiB BLOCKS. With --trim blocks are also discarded and zeroed, where the device can.
      Prints, if asked: mixed stall ms=LENGTH at=MS      when MS passed without a write acknowledged
                        mixed progress at=MS writes=N    every MS
  workload write-pattern DEV --bytes N [--seed 1]
  workload check-pattern DEV --bytes N [--seed 1]
      The pattern the host can compute too. N is a multiple of 4096.
  workload held DEV --run N [--seed 1] [--read] [--write] [--flush] [--bus-master|--reset|--power-off]
      A read, a write and a flush (or those asked for) that the host's storage holds; meanwhile nothing, or
      Bus Master off and on, or a reset of the device, or power-off. In step with the host by lines of
      standard input. DEV has the pattern. Blocks 4N to 4N + 3 are run N's.
      Prints: held N ready, issued, acting, acted: WHAT, ended: WHAT, over: ok or over: REASON
  workload episodes DEV,LOG [--seed 1]
      Writers that put down on LOG what DEV has acknowledged, under storage that misbehaves: in step with the host by lines of
      standard input (begin, issue, act, finish, quit). The first MiB of DEV is zeroes.
      Prints: episode N ready, issued, acting, acted ms=…, over: ok … or over: REASON
  workload age --mib N
      A child writes N MiB of memory and ends, so that the guest's free memory has been used.
      Prints: age ok mib=N
  workload sequential DEV [--mib 100] [--iterations 4] [--alloc-mib 80] [--seed 1] [--marker] [--step]
      Reads the first MIB MiB in order, through the page cache, ITERATIONS times, and checks the pattern; then
      a child fills ALLOC-MIB MiB of memory page by page and checks it (0: no child).
      Prints: sequential phase=read-I ok pages=… for each iteration, from 0
              sequential phase=alloc ok pages=…, or sequential alloc killed, where memory was short: no failure
      With --marker each phase is a window between markers 1 and 2: 16 + I stands before that of iteration I, 32 before
      the child's, 33 when it has filled its memory, 34 after its end.
      With --step it prints before each phase, and after the last: sequential step=16 + I, 32, 33, 34
      with cached=… unwritten=…, the pages of this kernel's page cache and those that the disk has not got, and waits for a
      line of standard input, for who counts from outside.
  workload compile DEV [--mib 100] [--units 96] [--phases 6] [--seed 1] [--marker] [--step]
      Unit by unit: reads a source (anywhere in the first MIB MiB) and 24 headers (in the first quarter of them) through the page
      cache, fills 1 to 12 MiB in a process that ends then, and writes an object behind the MIB MiB, which has 64 KiB of room for
      each unit. Sources, headers and objects have 4 to 64 KiB.
      UNITS units in PHASES phases; in one more all objects are read again.
  workload compress DEV [--mib 64] [--window-mib 24] [--phases 6] [--seed 1] [--marker] [--step]
      Reads the first MIB MiB in order through the page cache, keeps what it read last in a window in memory, looks into it, and
      writes a quarter as much behind the MIB MiB, in PHASES phases; in one more all output is read again.
  workload collect [--mib 96] [--collections 6] [--seed 1] [--marker] [--step]
      Allocates objects of 64 bytes to 2 KiB in half of MIB MiB until that is full, and copies a quarter of them, or fewer, to the
      other half, in the order of addresses: COLLECTIONS times, a phase each.
      All three check every byte that they read, and print: compile ok fnv=CHECKSUM, the same for the same numbers, or
      compile killed, where memory was short: no failure. Their --marker and --step are those of sequential, with 16 + I
      before phase I, from 0, and 35 after the last.
  workload verify DEV --seconds S --mib M [--seed 1] [--threads 2] [--skip-blocks B]
      M MiB of memory and the disk go through all that a guest does to them: pages are filled, overwritten in
      part or by REP instructions, zeroed, copied, given back, unmapped, forked; blocks are written, read,
      zeroed and discarded through the page cache and without; content goes to and fro. Destroys the content
      of 128 MiB of the disk at most, behind the first B blocks of 4 KiB. On a disk, not a file, it also drops
      the kernel's caches.
      Prints every 5 s: verify progress ms=… operations=N phase=…
      Prints at the end: verify kind=KIND count=… pages=… for each kind of operation
                         verify ok operations=N pages=… blocks=… seconds=…
      (N comparisons), or says what the first wrong byte is, where, and what was done to its page.
  workload udp-echo ADDR:PORT [--count 100] [--wait-ms 2000]
                    [--depth N [--bytes N] [--warmup 120] [--windows 1] [--no-markers] [--nic N]]
      Sends datagrams and checks the answers, one at a time; what is lost is sent again. With --depth so many are in flight, each
      window of COUNT answers lies between two markers, and what is lost is a failure. They have 8 to 1,400 bytes, or --bytes all.
  workload tcp-stream ADDR:PORT [--count 1000] [--bytes 64] [--receive] [--seed 1] [--wait-ms 2000] [--warmup 120] [--windows 1]
                      [--no-markers] [--nic N]
      Writes pieces of so many bytes to a peer, which checks them, or reads them from it and checks them: a system call each, and
      Nagle's algorithm as it is by default. Each window of COUNT pieces lies between two markers.
      Prints at the end: tcp-stream ok bytes=… (all of them)
      With --nic N both print for each window what Linux counted of ethN between its markers:
      nic window=I frames_out=… frames_in=… bytes_out=… bytes_in=… interrupts=…
  workload rr ADDR:PORT [--udp] [--count 1000] [--bytes 1] [--wait-ms 2000] [--warmup 120] [--windows 1] [--no-markers]
      Requests of so many bytes (1 to 1,400) to a peer that sends them back, one at a time, over one TCP connection without Nagle's
      algorithm or as datagrams; each window of COUNT answers lies between two markers. What is lost is a failure.
      Prints at the end: rr ok count=… (the windows only)
  workload web ADDR:PORT [--connections 100] [--count 1000] [--wait-ms 2000] [--warmup 120] [--windows 1] [--no-markers]
      Is a server of short responses (1 KiB for 128 bytes, both checked), a connection each, to so many clients at a time (128 at
      most) that the peer is asked for; each window of COUNT responses lies between two markers.
      Prints at the end: web ok count=… (the windows only)
  workload peer PORT
      The other end of these, for ever: datagrams go back, connections are checked, clients connect to who asks for them. For a
      network of the test's own.
      Prints, when it has the port (0: one that is free): peer ready port=…
  workload dma-rogue ADDRESS [--mask-bits 28] [--wait-ms 0] [--pause-ms 0] [--remap] [--pieces [--count 64] [--seed 1]]
      ADDRESS is the PCI address of QEMU's device `edu`, bound to vfio-pci; it names addresses of so many bits (edu,dma_mask=…).
      Copies through mappings, both ways, and compares; then asks for DMA that no mapping allows, and looks whether memory changed,
      or whether the device got to see it:
      unmapped: never mapped, at the physical address of a page of this program; read-only; revoked: mapped, used, unmapped,
      and used again, at once or after --wait-ms; with --remap the same IOVA has another page by then, which the copy has to
      reach instead. Before each it waits --pause-ms: a kernel's log takes about three faults in five seconds.
      With --pieces it then makes and ends mappings of 1 to 64 pages, and halves of 2 MiB, in COUNT steps of some half a second each,
      in an order by the seed; half of them continue another one. It compares what is copied through them, through those beside one
      that has ended, and what is copied to one that has ended. (For large pages in this program's memory:
      echo always >/sys/kernel/mm/transparent_hugepage/shmem_enabled.)
      Prints: rogue STATE blocked=yes iova=0x… access=write (or blocked=no; or read)
              pieces maps=… unmaps=… cuts=… copies=… rogues=… arrived=…
              dma-rogue ok attempts=…; it fails where anything arrived
  workload idle --seconds S
      Marker, sleep, marker.
  workload button
      Prints: button ready; waits until the power button is pressed, and prints: button pressed
  workload marker N
      Writes one marker (1 begins a window, 2 ends it, 3 to 255 are free).

Markers are bytes written to I/O port 0xe0; they need root. With --trace those of reads, udp-echo, tcp-stream, rr and web are lines
of the kernel's trace too: workload marker N (/sys/kernel/tracing has to be mounted).";

fn main() -> ExitCode {
    let mut options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(reason) => return refuse(&reason),
    };
    let command = options.command.clone();
    let outcome = match command.as_str() {
        "reads" => windows::reads(&mut options),
        "deep" => windows::deep(&mut options),
        "late" => late::run(&mut options),
        "mixed" => mix(&mut options),
        "write-pattern" => write_pattern(&mut options),
        "check-pattern" => check_pattern(&mut options),
        "held" => hold(&mut options),
        "episodes" => episodes(&mut options),
        "age" => age(&mut options),
        "sequential" => sequential(&mut options),
        "compile" => compile(&mut options),
        "compress" => compress(&mut options),
        "collect" => collect(&mut options),
        "verify" => verify(&mut options),
        "udp-echo" => windows::udp_echo(&mut options),
        "tcp-stream" => windows::tcp_stream(&mut options),
        "rr" => windows::rr(&mut options),
        "web" => windows::web(&mut options),
        "peer" => windows::serve(&mut options),
        "dma-rogue" => dma_rogue::run(&mut options),
        "idle" => windows::idle(&mut options),
        "button" => button(),
        "marker" => mark(&mut options),
        "help" | "--help" | "-h" => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        other => return refuse(&format!("no command {other:?}; `workload help` lists them")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(reason)) => refuse(&reason),
        Err(Failure::Run(reason)) => {
            eprintln!("workload {command}: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn refuse(reason: &str) -> ExitCode {
    eprintln!("workload: {reason}");
    ExitCode::from(2)
}

fn mix(options: &mut Options) -> Result<(), Failure> {
    let config = MixedConfig {
        duration: Duration::from_secs(options.number("seconds", None)?),
        seed: options.number("seed", Some(1))?,
        depth: options.number("depth", Some(8))?,
        skip: options.number("skip", Some(0))?,
        trim: options.flag("trim"),
        stall: options.maybe_number("stall-ms")?.map(Duration::from_millis),
        progress: options
            .maybe_number("progress-ms")?
            .map(Duration::from_millis),
    };
    let device = options.subject("DEV")?;
    let report = mixed::run(Path::new(&device), &config, &|event| match event {
        Event::Wrong(text) => eprintln!("mixed: {text}"),
        // One write each, so that lines of several threads do not mix on a console.
        Event::Stall(stall) => say(&format!(
            "mixed stall ms={} at={}\n",
            stall.length.as_millis(),
            stall.end.as_millis()
        )),
        Event::Progress { at, writes } => {
            say(&format!(
                "mixed progress at={} writes={writes}\n",
                at.as_millis()
            ));
        }
    })?;
    let verdict = if report.errors == 0 { "ok" } else { "failed" };
    println!(
        "mixed {verdict} reads={} writes={} flushes={} discards={} zeroes={} errors={}",
        report.reads, report.writes, report.flushes, report.discards, report.zeroes, report.errors
    );
    if report.errors == 0 {
        Ok(())
    } else {
        Err(Failure::Run("content is not as written".into()))
    }
}

/// Prints and flushes; a console that is gone does not stop the run.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Blocks of the pattern transferred at a time.
const PATTERN_RUN: u64 = 64;

/// Calls `each(first block, bytes)` over `bytes` of a device.
fn pattern_runs(
    options: &mut Options,
    mut each: impl FnMut(u64, usize) -> Result<(), Failure>,
) -> Result<u64, Failure> {
    let bytes = options.number("bytes", None)?;
    if bytes == 0 || !bytes.is_multiple_of(BLOCK as u64) {
        return Err(Failure::Usage(format!(
            "--bytes {bytes} is not a multiple of {BLOCK}"
        )));
    }
    let blocks = bytes / BLOCK as u64;
    let mut at = 0;
    while at < blocks {
        let run = PATTERN_RUN.min(blocks - at);
        each(
            at,
            usize::try_from(run).expect("at most PATTERN_RUN") * BLOCK,
        )?;
        at += run;
    }
    Ok(bytes)
}

fn write_pattern(options: &mut Options) -> Result<(), Failure> {
    let seed = options.number("seed", Some(1))?;
    let file = device::open(Path::new(&options.subject("DEV")?), true)?;
    let bytes = pattern_runs(options, |at, len| {
        let mut buffer = Buffer::new(len);
        pattern::fill(seed, at * BLOCK as u64, buffer.bytes_mut());
        Ok(device::write(&file, at, &buffer)?)
    })?;
    file.sync_all()?;
    println!("write-pattern ok bytes={bytes} seed={seed}");
    Ok(())
}

fn check_pattern(options: &mut Options) -> Result<(), Failure> {
    let seed = options.number("seed", Some(1))?;
    let file = device::open(Path::new(&options.subject("DEV")?), false)?;
    let bytes = pattern_runs(options, |at, len| {
        let mut buffer = Buffer::new(len);
        device::read(&file, at, &mut buffer)?;
        pattern::check(seed, at * BLOCK as u64, buffer.bytes()).map_err(Failure::Run)
    })?;
    println!("check-pattern ok bytes={bytes} seed={seed}");
    Ok(())
}

fn hold(options: &mut Options) -> Result<(), Failure> {
    let asked: Vec<HeldAction> = [
        HeldAction::BusMaster,
        HeldAction::Reset,
        HeldAction::PowerOff,
    ]
    .into_iter()
    .filter(|act| options.flag(act.name()))
    .collect();
    let act = match *asked {
        [] => HeldAction::Wait,
        [act] => act,
        _ => return Err(Failure::Usage("one of the three acts at a time".into())),
    };
    let config = HeldConfig {
        blocks: Blocks {
            run: options.number("run", None)?,
        },
        seed: options.number("seed", Some(1))?,
        kinds: held::kinds(|name| options.flag(name)),
        disk: options.subject("DEV")?.into(),
        act,
    };
    held::run(&config).map_err(Failure::Run)
}

fn episodes(options: &mut Options) -> Result<(), Failure> {
    let disks = options.subject("DEV,LOG")?;
    let (disk, log) = disks
        .split_once(',')
        .ok_or_else(|| Failure::Usage(format!("{disks:?} is not DEV,LOG")))?;
    let config = EpisodesConfig {
        disk: disk.into(),
        log: log.into(),
        seed: options.number("seed", Some(1))?,
    };
    workload::episodes::run(&config).map_err(Failure::Run)
}

fn age(options: &mut Options) -> Result<(), Failure> {
    let mib = options.number("mib", None)?;
    workload::age::run(mib).map_err(Failure::Run)?;
    println!("age ok mib={mib}");
    Ok(())
}

fn sequential(options: &mut Options) -> Result<(), Failure> {
    let config = SequentialConfig {
        mib: options.number("mib", Some(100))?,
        iterations: options.number("iterations", Some(4))?,
        alloc_mib: options.number("alloc-mib", Some(80))?,
        seed: options.number("seed", Some(1))?,
        disk: options.subject("DEV")?.into(),
    };
    let steps = Steps::take(options)?;
    sequential::run(&config, &mut |event| match event {
        sequential::Event::Mark(value) => steps.mark(value),
        sequential::Event::Read { iteration, pages } => {
            println!("sequential phase=read-{iteration} ok pages={pages}");
        }
        sequential::Event::Alloc { pages } => {
            println!("sequential phase=alloc ok pages={pages}");
        }
        sequential::Event::AllocKilled => println!("sequential alloc killed"),
    })
    .map_err(Failure::Run)
}

fn compile(options: &mut Options) -> Result<(), Failure> {
    let config = CompileConfig {
        mib: options.number("mib", Some(100))?,
        units: options.number("units", Some(96))?,
        phases: options.number("phases", Some(6))?,
        seed: options.number("seed", Some(1))?,
        disk: options.subject("DEV")?.into(),
    };
    in_phases(options, |mark| compile::run(&config, mark))
}

fn compress(options: &mut Options) -> Result<(), Failure> {
    let config = CompressConfig {
        mib: options.number("mib", Some(64))?,
        window_mib: options.number("window-mib", Some(24))?,
        phases: options.number("phases", Some(6))?,
        seed: options.number("seed", Some(1))?,
        disk: options.subject("DEV")?.into(),
    };
    in_phases(options, |mark| compress::run(&config, mark))
}

fn collect(options: &mut Options) -> Result<(), Failure> {
    let config = CollectConfig {
        mib: options.number("mib", Some(96))?,
        collections: options.number("collections", Some(6))?,
        seed: options.number("seed", Some(1))?,
    };
    in_phases(options, |mark| collect::run(&config, mark))
}

/// Runs a workload in phases, and prints its result.
fn in_phases(
    options: &mut Options,
    run: impl FnOnce(&mut dyn FnMut(u8)) -> Result<Option<u64>, String>,
) -> Result<(), Failure> {
    let steps = Steps::take(options)?;
    let command = &options.command;
    match run(&mut |value| steps.mark(value)).map_err(Failure::Run)? {
        Some(sum) => println!("{command} ok fnv={sum:016x}"),
        None => println!("{command} killed"),
    }
    Ok(())
}

fn verify(options: &mut Options) -> Result<(), Failure> {
    let config = VerifyConfig {
        duration: Duration::from_secs(options.number("seconds", None)?),
        mib: options.number("mib", None)?,
        seed: options.number("seed", Some(1))?,
        threads: options.number("threads", Some(2))?,
        skip: options.number("skip-blocks", Some(0))?,
        progress: Duration::from_secs(5),
    };
    let device = options.subject("DEV")?;
    let report = verify::run(Path::new(&device), &config, &|event| match event {
        verify::Event::Note(text) => say(&format!("verify: {device}: {text}\n")),
        verify::Event::Begins { .. } => {}
        verify::Event::Progress {
            at,
            operations,
            phase,
        } => say(&format!(
            "verify progress ms={} operations={operations} phase={}\n",
            at.as_millis(),
            phase.map_or("last-pass", verify::Phase::name)
        )),
    })
    .map_err(Failure::Run)?;
    for kind in verify::Kind::ALL {
        let count = report.counts.of(kind);
        let note = if count.operations == 0 {
            " (not possible here)"
        } else {
            ""
        };
        println!(
            "verify kind={} count={} pages={}{note}",
            kind.name(),
            count.operations,
            count.pages
        );
    }
    println!(
        "verify ok operations={} pages={} blocks={} seconds={:.1}",
        report.operations,
        report.pages,
        report.blocks,
        report.elapsed.as_secs_f64()
    );
    Ok(())
}

fn button() -> Result<(), Failure> {
    let events = workload::button::open()?;
    say("button ready\n");
    workload::button::wait(events)?;
    say("button pressed\n");
    Ok(())
}

fn mark(options: &mut Options) -> Result<(), Failure> {
    let text = options.subject("N")?;
    let value = text.parse::<u8>().ok().filter(|value| *value > 0);
    let value = value.ok_or_else(|| Failure::Usage(format!("{text:?} is not 1 to 255")))?;
    Markers::open()?.write(value);
    Ok(())
}
