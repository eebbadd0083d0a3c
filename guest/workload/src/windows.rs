//! Commands whose requests are counted from outside the guest, in windows between two markers.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use workload::deep::{self, DeepConfig};
use workload::device::{self, Buffer};
use workload::echo::{self, EchoConfig};
use workload::marker::{self, Markers, RequestWindows};
use workload::nic::NicCounts;
use workload::pattern::{Checksum, Random};
use workload::rr::{self, RrConfig, Transport};
use workload::stream::{self, Direction, StreamConfig};
use workload::web::{self, WebConfig};
use workload::{BLOCK, peer};

use crate::failure::Failure;
use crate::options::Options;

fn wants_markers(options: &mut Options) -> bool {
    !options.flag("no-markers")
}

/// Opens the markers that are asked for: `--no-markers`, `--trace`.
fn markers(options: &mut Options) -> io::Result<Option<Markers>> {
    let open = match options.flag("trace") {
        true => Markers::open_traced,
        false => Markers::open,
    };
    wants_markers(options).then(open).transpose()
}

/// Returns a function that writes those markers.
fn marks(options: &mut Options) -> io::Result<deep::Mark> {
    Ok(write_to(markers(options)?))
}

/// Parses `--warmup` and `--windows`, of `count` requests each.
fn windows(options: &mut Options, count: u64) -> Result<RequestWindows, Failure> {
    let warmup = options.number("warmup", Some(120))?;
    let windows = options.number("windows", Some(1))?;
    RequestWindows::new(warmup, count, windows).map_err(|error| Failure::Usage(error.to_string()))
}

/// Returns a function that writes markers if they are wanted, else nothing.
fn open_mark(is_wanted: bool) -> io::Result<deep::Mark> {
    Ok(write_to(is_wanted.then(Markers::open).transpose()?))
}

fn write_to(markers: Option<Markers>) -> deep::Mark {
    Box::new(move |value| {
        if let Some(markers) = &markers {
            markers.write(value);
        }
    })
}

/// Largest number of reads in one window: 64 MiB of data are stored.
const COUNT_MAX: usize = 1 << 14;

/// Computes for `time`; sleeping would arm a timer.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// `reads`: one at a time.
pub fn reads(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(400))?;
    let warmup = options.number("warmup", Some(120))?;
    let windows = options.number("windows", Some(1))?;
    let seed = options.maybe_number("random")?;
    let markers = markers(options)?;
    let is_in_steps = options.flag("step");
    let in_place = options.flag("in-place");
    let kept = if in_place { 0 } else { count };
    let kept_len = usize::try_from(kept)
        .ok()
        .filter(|count| *count <= COUNT_MAX);
    let kept_len = kept_len.ok_or_else(|| {
        Failure::Usage(format!(
            "--count {count} is above {COUNT_MAX}: take more windows, or --in-place"
        ))
    })? * BLOCK;
    let pause = Duration::from_micros(options.number("pause-us", Some(0))?);
    let buffers = options.number("buffers", Some(1))?;
    let buffers = usize::try_from(buffers)
        .ok()
        .filter(|count| (1..=COUNT_MAX).contains(count));
    let buffers =
        buffers.ok_or_else(|| Failure::Usage(format!("--buffers is 1 to {COUNT_MAX}")))?;
    let device = options.subject("DEV")?;
    let file = device::open(Path::new(&device), false)?;
    let blocks = device::blocks(&file)?;
    let mut random = seed.map(Random::new);
    let mut numbers = (0..blocks).cycle();
    let mut next = || match &mut random {
        Some(random) => random.below(blocks),
        None => numbers.next().expect("a cycle of at least one block"),
    };
    let buffers_len = buffers;
    let mut buffers: Vec<Buffer> = (0..buffers).map(|_| Buffer::new(BLOCK)).collect();
    let mut turn = 0;
    let mut read = |take: &mut dyn FnMut(&mut Buffer)| {
        let buffer = &mut buffers[turn];
        turn = (turn + 1) % buffers_len;
        device::read(&file, next(), buffer)?;
        take(buffer);
        io::Result::Ok(())
    };
    // Summing between the requests would be work that is not theirs, so a window's data is kept.
    // Filled with something other than zero, so that its memory exists before the first window.
    let mut kept = vec![0xff; kept_len];
    let mut sum = Checksum::default();
    for window in 1..=windows {
        for _ in 0..warmup {
            read(&mut |_| ())?;
        }
        if let Some(markers) = &markers {
            markers.write(marker::BEGIN);
        }
        for copy in kept.chunks_mut(BLOCK) {
            spin(pause);
            read(&mut |buffer| copy.copy_from_slice(buffer.bytes()))?;
        }
        let times = if in_place { count } else { 0 };
        for _ in 0..times {
            spin(pause);
            read(&mut |buffer| {
                sum.add(buffer.bytes());
                buffer.bytes_mut()[0] ^= 1;
            })?;
        }
        if let Some(markers) = &markers {
            markers.write(marker::END);
        }
        sum.add(&kept);
        println!("reads window={window} of={windows}");
        if is_in_steps {
            // The end of the input is as good as a line: then the host does not count any more.
            let _ = io::stdin().read_line(&mut String::new());
        }
    }
    let (count, bytes) = (count * windows, count * windows * BLOCK as u64);
    println!(
        "reads ok count={count} bytes={bytes} fnv={:016x}",
        sum.value()
    );
    Ok(())
}

/// `deep`: many requests in flight.
pub fn deep(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(400))?;
    let config = DeepConfig {
        depth: options.number("depth", Some(32))?,
        seed: options.number("seed", Some(1))?,
        write: options.flag("write"),
        windows: windows(options, count)?,
    };
    let is_marked = wants_markers(options);
    let device = options.subject("DEV")?;
    deep::run(Path::new(&device), &config, &|| open_mark(is_marked))?;
    println!("deep ok count={}", config.windows.counted());
    Ok(())
}

/// Counts of an interface in windows (`--nic N`: `ethN`), between their markers.
struct NicWindows {
    interface: String,
    begun: Cell<NicCounts>,
    windows: RefCell<Vec<io::Result<NicCounts>>>,
}

impl NicWindows {
    /// Wraps `mark` so that it also reads the counts of the interface of `--nic`, if that is given.
    ///
    /// # Errors
    /// There is no such interface.
    fn beside(
        options: &mut Options,
        mark: deep::Mark,
    ) -> Result<(deep::Mark, Option<Rc<Self>>), Failure> {
        let Some(number) = options.maybe_number("nic")? else {
            return Ok((mark, None));
        };
        let interface = format!("eth{number}");
        let begun = NicCounts::read(&interface)
            .map_err(|error| Failure::Run(format!("{interface}: {error}")))?;
        let this = Rc::new(Self {
            interface,
            begun: Cell::new(begun),
            windows: RefCell::default(),
        });
        let counted = this.clone();
        let mark = move |value| {
            // The interface is read inside the window: the window's exits include those of the two
            // reads, and of all frames counted.
            match value {
                marker::BEGIN => {
                    mark(value);
                    let now = NicCounts::read(&counted.interface);
                    counted.begun.set(now.unwrap_or(begun));
                }
                _ => {
                    let now = NicCounts::read(&counted.interface);
                    mark(value);
                    let window = now.map(|now| now.since(&counted.begun.get()));
                    counted.windows.borrow_mut().push(window);
                }
            }
        };
        Ok((Box::new(mark), Some(this)))
    }

    /// Prints a line for each window.
    fn print(this: Option<Rc<Self>>) -> Result<(), Failure> {
        let Some(this) = this else {
            return Ok(());
        };
        for (number, window) in this.windows.take().into_iter().enumerate() {
            println!("nic window={} {}", number + 1, window?.line());
        }
        Ok(())
    }
}

/// Parses the command's operand, an address.
fn address(options: &mut Options) -> Result<SocketAddr, Failure> {
    let text = options.subject("ADDR:PORT")?;
    let address = text.parse();
    address.map_err(|_| Failure::Usage(format!("{text:?} is no ADDR:PORT")))
}

/// `--wait-ms`, 1 ms at least.
fn wait(options: &mut Options) -> Result<Duration, Failure> {
    let wait = options.number("wait-ms", Some(2000))?;
    Ok(Duration::from_millis(wait.max(1)))
}

/// `udp-echo`: one at a time, or many in flight.
pub fn udp_echo(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(100))?;
    let wait = wait(options)?;
    let to = address(options)?;
    if let Some(depth) = options.maybe_number("depth")? {
        let config = EchoConfig {
            depth,
            bytes: options.maybe_number("bytes")?.map(as_usize),
            windows: windows(options, count)?,
            wait,
        };
        let mark = marks(options)?;
        let (mark, nic) = NicWindows::beside(options, mark)?;
        echo::pipelined(to, &config, &mark)?;
        NicWindows::print(nic)?;
        println!("udp-echo ok count={}", config.windows.counted());
        return Ok(());
    }
    let report = echo::run(to, count, wait)?;
    println!("udp-echo ok count={} resent={}", report.ok, report.resent);
    Ok(())
}

/// `tcp-stream`: pieces of one connection.
pub fn tcp_stream(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(1000))?;
    let config = StreamConfig {
        direction: match options.flag("receive") {
            true => Direction::Receive,
            false => Direction::Send,
        },
        piece: as_usize(options.number("bytes", Some(64))?),
        windows: windows(options, count)?,
        seed: options.number("seed", Some(1))?,
        wait: wait(options)?,
    };
    let to = address(options)?;
    let mark = marks(options)?;
    let (mark, nic) = NicWindows::beside(options, mark)?;
    let bytes = stream::run(to, &config, &mark)?;
    NicWindows::print(nic)?;
    println!("tcp-stream ok bytes={bytes}");
    Ok(())
}

/// `rr`: requests and answers, one at a time.
pub fn rr(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(1000))?;
    let config = RrConfig {
        carrier: match options.flag("udp") {
            true => Transport::Udp,
            false => Transport::Tcp,
        },
        bytes: as_usize(options.number("bytes", Some(1))?),
        windows: windows(options, count)?,
        wait: wait(options)?,
    };
    let to = address(options)?;
    rr::run(to, &config, &marks(options)?)?;
    println!("rr ok count={}", config.windows.counted());
    Ok(())
}

/// `web`: a connection for each request.
pub fn web(options: &mut Options) -> Result<(), Failure> {
    let count = options.number("count", Some(1000))?;
    let config = WebConfig {
        connections: options.number("connections", Some(100))?,
        windows: windows(options, count)?,
        wait: wait(options)?,
    };
    let to = address(options)?;
    web::serve(to, &config, &marks(options)?)?;
    println!("web ok count={}", config.windows.counted());
    Ok(())
}

/// Converts a size; one that does not fit becomes a size that is not allowed.
fn as_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// `peer`: the other end of these connections.
pub fn serve(options: &mut Options) -> Result<(), Failure> {
    let text = options.subject("PORT")?;
    let port = text.parse();
    let port = port.map_err(|_| Failure::Usage(format!("{text:?} is no PORT")))?;
    let peer = peer::Peer::bind(port)?;
    println!("peer ready port={}", peer.address()?.port());
    Ok(peer.serve(|text| eprintln!("peer: {text}"))?)
}

/// `idle`: does nothing for a while.
pub fn idle(options: &mut Options) -> Result<(), Failure> {
    let seconds = options.number("seconds", None)?;
    let markers = Markers::open()?;
    markers.write(marker::BEGIN);
    let begin = Instant::now();
    thread::sleep(Duration::from_secs(seconds));
    let slept = begin.elapsed();
    markers.write(marker::END);
    println!("idle ok ms={}", slept.as_millis());
    Ok(())
}
