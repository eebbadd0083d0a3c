//! `cargo run --release -p dma-trace`: records which pages a stock kernel maps and unmaps for a
//! network card.
//!
//! The lab boots Debian's kernel in QEMU with an emulated VT-d (caching mode off) and a network
//! card behind it, on one processor; kernel options `intel_iommu=on iommu.strict=1`, so that each
//! unmap is an event of its own. Tracing starts before the card's driver is loaded, so every unmap
//! has its map. Traffic is TCP over QEMU's user networking: a download, an upload, then both at
//! once, with frames of 1,514 bytes. Nothing here needs root.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use dma_trace::{Action, Trace, ftrace, reuse};
use lab::kernel::Modules;
use lab::packages::{Needs, Packages};
use lab::{Lab, LabConfig};

/// Records the page sequence of a stock kernel's DMA mapping in the lab.
#[derive(Parser)]
struct Args {
    /// The emulated network card.
    #[arg(long, value_enum, default_value = "virtio-net")]
    device: Device,
    /// Where the trace goes; the kernel's version is added to the default.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Bytes of the download and of the upload, each; a third of that again in both directions at
    /// once.
    #[arg(long, default_value_t = 6_000_000)]
    bytes: u64,
    /// Keep at most so many events.
    #[arg(long, default_value_t = 40_000)]
    events: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// virtio-net with `iommu_platform=on`, rings of 512 and 256.
    VirtioNet,
    /// VMware's card, whose driver maps like one for hardware.
    Vmxnet3,
}

impl Device {
    fn name(self) -> &'static str {
        match self {
            Self::VirtioNet => "virtio-net",
            Self::Vmxnet3 => "vmxnet3",
        }
    }

    fn module(self) -> &'static str {
        match self {
            Self::VirtioNet => "virtio_net",
            Self::Vmxnet3 => "vmxnet3",
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::VirtioNet => {
                "virtio-net-pci,netdev=n,disable-legacy=on,iommu_platform=on,rx_queue_size=512,\
                 guest_tso4=off,guest_tso6=off,host_tso4=off,host_tso6=off"
            }
            Self::Vmxnet3 => "vmxnet3,netdev=n",
        }
    }
}

/// Shell commands that turn the events on. On x86-64 `map_pages` has its IOVA in rsi and its
/// protection in r9.
const TRACE_ON: &str = "cd /sys/kernel/tracing && echo 65536 > buffer_size_kb && \
    echo 'p:dma/prot intel_iommu_map_pages iova=%si:x64 prot=%r9:x64' > kprobe_events && \
    echo 1 > events/dma/prot/enable && echo 1 > events/iommu/map/enable && \
    echo 1 > events/iommu/unmap/enable && echo 1 > tracing_on";

const NET_UP: &str = "ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up";

fn main() -> Result<()> {
    let args = Args::parse();
    let packages = Packages::get(&Needs::default(), &|line| eprintln!("dma-trace: {line}"))?;
    let config = LabConfig {
        memory_mib: 512,
        cpus: 1,
        kernel_options: "intel_iommu=on iommu.strict=1".into(),
        qemu_args: [
            "-machine",
            "kernel-irqchip=split",
            "-device",
            "intel-iommu,intremap=on,caching-mode=off",
            "-netdev",
            "user,id=n",
            "-device",
            args.device.option(),
        ]
        .map(str::to_owned)
        .to_vec(),
        ..LabConfig::default()
    };
    let lab = Lab::start(&config)?;
    shell(&lab, TRACE_ON)?;
    for module in
        Modules::below(&packages.host().modules())?.in_load_order(&[args.device.module()])?
    {
        let inside = format!("/tmp/{}.ko", module.name);
        lab.push_bytes(&module.data, &inside, 0o644)?;
        // An error is ignored: the image may have loaded the module already. Whether the driver
        // itself is loaded shows when its interface is configured.
        lab.exec("/bin/insmod", [inside])?;
    }
    shell(&lab, NET_UP)?;
    download(&lab, args.bytes)?;
    upload(&lab, args.bytes)?;
    let (lab_ref, third) = (&lab, args.bytes / 3);
    thread::scope(|scope| {
        let down = scope.spawn(move || download(lab_ref, third));
        upload(&lab, third)?;
        down.join().expect("a download that panics is a bug")
    })?;
    shell(&lab, "echo 0 > /sys/kernel/tracing/tracing_on")?;
    let text = String::from_utf8(lab.pull_bytes("/sys/kernel/tracing/trace")?)
        .context("the kernel's trace is not text")?;
    lab.shutdown()?;
    write(&args, packages.host().release(), &text)
}

fn write(args: &Args, kernel: &str, text: &str) -> Result<()> {
    let mut recorded = ftrace::read(text).map_err(anyhow::Error::msg)?;
    let all = recorded.events.len();
    ensure!(
        all > 1000,
        "only {all} events: the driver does not map through the IOMMU"
    );
    let maps = recorded.events.iter().filter(|e| e.action == Action::Map);
    let within = recorded.within_10_ms as f64 * 100.0 / maps.count() as f64;
    recorded.events.truncate(args.events);
    let mut trace = Trace {
        head: Vec::new(),
        events: recorded.events,
    };
    let reuse = reuse::of(&trace);
    let head = [
        (
            "kernel",
            format!("{kernel} (Debian, unmodified; intel_iommu=on iommu.strict=1)"),
        ),
        ("device", format!("QEMU {}", args.device.option())),
        (
            "load",
            format!(
                "TCP over user networking, MTU 1500, one CPU: {0} bytes down, {0} up, then {1} \
                 both ways at once",
                args.bytes,
                args.bytes / 3
            ),
        ),
        (
            "command",
            format!(
                "cargo run --release -p dma-trace -- --device {} --bytes {} --events {}",
                args.device.name(),
                args.bytes,
                args.events
            ),
        ),
        (
            "recorded",
            format!("{all} events, of which the first are kept"),
        ),
        ("events", trace.events.len().to_string()),
        ("maps", reuse.maps.to_string()),
        ("reuse", reuse.to_string()),
        (
            "reuse-10ms",
            format!("{within:.1} % of all recorded, by the emulated clock"),
        ),
    ];
    trace.head = head.map(|(key, value)| (key.to_owned(), value)).to_vec();
    let output = args.output.clone().unwrap_or_else(|| {
        let version = kernel.split('-').next().unwrap_or(kernel);
        format!("bench/dma/traces/{}-{version}.txt", args.device.name()).into()
    });
    let text = trace.to_text();
    fs::write(&output, &text).with_context(|| format!("write {}", output.display()))?;
    for (key, value) in &trace.head {
        println!("{key}: {value}");
    }
    println!("{} bytes in {}", text.len(), output.display());
    Ok(())
}

fn shell(lab: &Lab, script: &str) -> Result<()> {
    let out = lab.exec("/bin/sh", ["-c", script])?;
    if !out.success() {
        bail!("`{script}` in the lab: {}", out.stderr_text().trim());
    }
    Ok(())
}

/// Listens on the machine's loopback, which is 10.0.2.2 in the lab, and runs `script` there with
/// PORT replaced. Returns the result of `talk` on the connection.
fn serve(
    lab: &Lab,
    script: &str,
    talk: impl FnOnce(TcpStream) -> std::io::Result<u64> + Send,
) -> Result<u64> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listen on the loopback")?;
    let port = listener.local_addr()?.port();
    thread::scope(|scope| {
        let talker = scope.spawn(move || talk(listener.accept()?.0));
        let outcome = shell(lab, &script.replace("PORT", &port.to_string()));
        if outcome.is_err() {
            // The script failed, so no connection may come: connect here, so that the thread does
            // not wait for ever. It may have ended already.
            let _ = TcpStream::connect(("127.0.0.1", port));
        }
        outcome?;
        let count = talker
            .join()
            .expect("a conversation that panics is a bug")?;
        Ok(count)
    })
}

fn download(lab: &Lab, bytes: u64) -> Result<()> {
    let script = format!("test $(nc 10.0.2.2 PORT < /dev/null | wc -c) = {bytes}");
    serve(lab, &script, |mut stream| {
        std::io::copy(&mut std::io::repeat(0x5a).take(bytes), &mut stream)
    })?;
    Ok(())
}

fn upload(lab: &Lab, bytes: u64) -> Result<()> {
    let script = format!("head -c {bytes} /dev/zero | nc 10.0.2.2 PORT");
    let got = serve(lab, &script, move |mut stream| {
        let mut got = 0;
        let mut buffer = [0; 65_536];
        while got < bytes {
            match stream.read(&mut buffer)? {
                0 => break,
                count => got += count as u64,
            }
        }
        stream.flush()?;
        Ok(got)
    })?;
    ensure!(got == bytes, "{got} of {bytes} bytes arrived");
    Ok(())
}
