//! `exitless-lab lab`: runs `exitless` inside the emulated host of the `lab` crate.
//!
//! Standard input is passed to the command, its output is shown as it appears, and the exit status
//! is that of the command inside. The lab's own messages go to standard error, on lines that begin
//! with `lab:`. Exit status of the lab's own failures: 2 if it could not start, 1 if it stopped or
//! ran out of time.

mod terminal;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use lab::guest_module::ModuleSources;
use lab::packages::{Needs, Version};
use lab::{Lab, LabConfig, LabError, Running, Stream};

use crate::system::programs::Programs;

/// Note on an error that may be the emulated processor's. The lab's README lists the known ones.
const MAY_BE_THE_LABS: &str = "this may be a fault of the emulated processor, which now and then \
     takes an interrupt when it must not, and not of \
     the guest or of exitless: try again (lab/README.md, «What QEMU gets wrong»)";

/// A day: an interactive session ends when its user wants.
const SHELL_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// Text of the help after its options.
pub const EXAMPLES: &str = "\
The lab is an emulated AMD host with a real /dev/kvm: slow, but complete. It needs no privileges. The first start downloads about 60 MB \
of Debian packages and installs nothing; they stay in the cache. --guest-module adds about 15 MB, and takes \
make and the compiler that the guest's kernel was built by. What your suites have not new enough is taken from the suites that follow \
on the same mirror. QEMU is 10 or newer by default, as in `make test`: older ones lose interrupts, and a guest with several vCPUs may \
then end in a triple fault that is the lab's.

Inside: /boot/vmlinuz and /boot/vmlinux (a stock kernel), /boot/guest.img (its initramfs; see exitless.run below), and both programs, \
exitless and exitless-lab. \
Commands start in /root, where --put leaves files.

Examples:
  What does the emulated host offer?
    exitless-lab lab -- doctor
  A stock guest that runs one command and powers off:
    exitless-lab lab -- run --kernel /boot/vmlinuz --initrd /boot/guest.img \\
        --cmdline 'console=ttyS0 exitless.run=\"uname -a; lspci\"'
  With a disk, brought back afterwards:
    exitless-lab lab --put disk.img --get disk.img -- run --kernel /boot/vmlinuz \\
        --initrd /boot/guest.img --disk path=disk.img
  With a large one, attached and not copied: /dev/vda of the emulated host, and the guest's disk
    exitless-lab lab --disk debian.img -- run --kernel /boot/vmlinuz \\
        --initrd /boot/guest.img --disk path=/dev/vda
  Talk to the guest's console, or look around in the emulated host:
    exitless-lab lab --tty -- run --kernel /boot/vmlinuz --initrd /boot/guest.img
    exitless-lab lab --shell
  The same with a newer kernel in host and guest:
    exitless-lab lab --kernel 6.12 --guest-kernel 6.12 -- doctor
  A guest behind a paravirtual IOMMU, whose driver is a module built from its sources (--guest-module)
  and not Linux's own, with a parameter; that, or none, is one more option of the guest's away
  (exitless.iommu=stock, exitless.iommu=none)
    exitless-lab lab --guest-kernel 6.12 --guest-module guest/iommu-module --put disk.img -- \\
        run --iommu virtio --kernel /boot/vmlinuz --initrd /boot/guest.img --disk path=disk.img \\
        --cmdline 'console=ttyS0 exitless_iommu.quota=4096 exitless.run=\"lsmod\"'
  An IOMMU in the emulated host, whose unmaps take effect at once, and a device behind it to assign:
    exitless-lab lab --shell --qemu=-device --qemu=intel-iommu,intremap=on --qemu=-device --qemu=edu \\
        --append 'intel_iommu=on iommu.strict=1'
  A guest whose disk writes where it may not:
    exitless-lab lab --exec --put disk.img -- exitless-lab run --kernel /boot/vmlinuz \\
        --initrd /boot/guest.img --disk path=disk.img --fault disk0:unmapped
  Any other program, with the libraries it links to:
    exitless-lab lab --exec --put target/debug/deps/vio-0123 -- ./vio-0123 --test-threads 1
  What the cache holds that no start needs any more, and to be rid of it:
    exitless-lab lab --prune --dry-run
    exitless-lab lab --prune

Exit status:
  1  The lab stopped, or ran out of time.
  2  It could not start; one line on standard error says why.
  other  That of the command inside.

Environment:
  EXITLESS_LAB_DIR  Where packages and built programs are kept [default: exitless/lab in the cache directory, $XDG_CACHE_HOME or ~/.cache].
  CARGO  The cargo that builds the lab's own programs, where the one on PATH is not to.
  RUST_LOG  What the log has, where --log is not given: see there.

Files:
  ~/.cache/exitless/lab  The cache: packages, kernels, and the lab's own programs, built for each source tree (programs-HASH); \
headers of kernels, and modules built by them (module-HASH, with debugging information beside each).";

/// Arguments of `exitless-lab lab`.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct LabArgs {
    /// Memory of the emulated host, MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    memory: u32,
    /// Processors of the emulated host; from three on the last is kept free for a sidecore
    #[arg(long, value_name = "N", default_value_t = 3)]
    cpus: u32,
    /// QEMU of this version or a newer one
    #[arg(long, value_name = "VERSION", default_value_t = Needs::default().qemu)]
    qemu_at_least: Version,
    /// Series of the emulated host's kernel, for example 6.12 [default: the distribution's]
    #[arg(long, value_name = "SERIES")]
    kernel: Option<Version>,
    /// Series of the guest's kernel and its modules in /boot [default: the distribution's]
    #[arg(long, value_name = "SERIES")]
    guest_kernel: Option<Version>,
    /// Sources of a kernel module, a directory with a Makefile for kbuild: it is built for the
    /// guest's kernel, and is in /boot/guest.img as the guest's driver of a virtio-iommu
    #[arg(long, value_name = "DIR", conflicts_with_all = ["export", "prune"])]
    guest_module: Option<PathBuf>,
    /// A variable for the make that builds it; repeat for more
    #[arg(long, value_name = "NAME=VALUE", requires = "guest_module")]
    guest_module_make: Vec<String>,
    /// Seconds the command may take [default: 300; a day with --shell or --tty]
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
    /// Show the emulated host's own console, and how long things took
    #[arg(long)]
    verbose: bool,
    /// Copy a file into the lab before the command, to /root unless PATH says otherwise
    #[arg(long, value_name = "FILE[:PATH]")]
    put: Vec<String>,
    /// Copy a file out of the lab after the command, to the current directory unless FILE says
    /// otherwise
    #[arg(long, value_name = "PATH[:FILE]")]
    get: Vec<String>,
    /// Attach a file or block device as the next disk of the emulated host: /dev/vda, /dev/vdb, …
    #[arg(long, value_name = "FILE")]
    disk: Vec<PathBuf>,
    /// More arguments for QEMU, for example a device to assign
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    qemu: Vec<String>,
    /// More options for the emulated host's kernel command line, for example iommu.strict=1
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    append: Vec<String>,
    /// An interactive shell in the emulated host
    #[arg(long, conflicts_with_all = ["args", "tty", "exec"])]
    shell: bool,
    /// Start nothing, but write a guest's kernel and image and a script that starts QEMU into DIR
    #[arg(long, value_name = "DIR", conflicts_with_all = ["args", "shell", "tty", "exec"])]
    export: Option<PathBuf>,
    /// Start nothing, but remove from the cache what no start of this build needs any more: the
    /// lab's programs as built for other source trees (all but the last three go by themselves when
    /// others are built), and Debian roots of other versions
    #[arg(long, conflicts_with_all = ["args", "shell", "tty", "exec", "export"])]
    prune: bool,
    /// Only say what that would remove
    #[arg(long, requires = "prune")]
    dry_run: bool,
    /// Give the command a terminal instead of pipes
    #[arg(long)]
    tty: bool,
    /// ARGS name a program inside rather than arguments of exitless
    #[arg(long)]
    exec: bool,
    /// Command to run inside
    #[arg(last = true, required_unless_present_any = ["shell", "export", "prune"])]
    args: Vec<String>,
}

impl LabArgs {
    /// Returns the arguments of `exitless` inside; none if another program runs.
    #[must_use]
    pub fn inside(&self) -> Option<&[String]> {
        (!self.exec && !self.shell && !self.prune).then_some(&self.args)
    }
}

/// Returns the reasons why a lab of the usual kind cannot start here.
#[must_use]
pub fn obstacles() -> Vec<String> {
    let mut found = lab::obstacles(&Needs::default());
    found.extend(Programs::find().err().map(|error| format!("{error:#}")));
    found
}

/// Runs `exitless-lab lab`; the status is that of the command inside.
pub fn main(args: &LabArgs) -> anyhow::Result<u8> {
    match run(args) {
        Ok(status) => Ok(status),
        Err(error) => match error.downcast_ref::<LabError>() {
            Some(LabError::Died { console, .. }) => {
                eprintln!("lab: {error:#}");
                if is_processors_fault(console) {
                    eprintln!("lab: {MAY_BE_THE_LABS}");
                }
                Ok(1)
            }
            Some(LabError::Timeout { .. }) => {
                eprintln!("lab: {error:#}");
                Ok(1)
            }
            _ => Err(error),
        },
    }
}

fn run(args: &LabArgs) -> anyhow::Result<u8> {
    if let Some(dir) = &args.export {
        lab::export::write(dir, &|line| eprintln!("lab: {line}"))?;
        return Ok(0);
    }
    if args.prune {
        return prune(args.dry_run);
    }
    let puts = args
        .put
        .iter()
        .map(|text| put_paths(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let gets = args
        .get
        .iter()
        .map(|text| get_paths(text))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let programs = Programs::find()?;
    let mut config = config(args, programs);
    // In the image programs bring their libraries, which a copy into a running lab would not.
    config.files = puts;
    let mut lab = Lab::start(&config)?;
    if args.verbose {
        let (all, boot) = (lab.start_up(), lab.boot_time());
        eprintln!("lab: started in {all:.1?}, of which booting {boot:.1?}");
    }
    let (status, screen) = if args.shell || args.tty {
        let (status, screen) = interact(args, &mut lab)?;
        (status, Some(screen))
    } else {
        (batch(args, &lab)?, None)
    };
    for (inside, host) in gets {
        lab.pull(&inside, &host)
            .with_context(|| format!("cannot get {inside}"))?;
    }
    lab.shutdown()?;
    if let Some(screen) = screen {
        // The terminal ended with the lab, so this does too; all output has been shown then.
        let _ = screen.join();
    }
    Ok(status)
}

/// Returns the emulated host that these arguments ask for, without the files to copy.
fn config(args: &LabArgs, programs: Programs) -> LabConfig {
    LabConfig {
        needs: Needs {
            qemu: args.qemu_at_least,
            host_kernel: args.kernel,
            guest_kernel: args.guest_kernel,
        },
        guest_module: args.guest_module.clone().map(|dir| ModuleSources {
            dir,
            variables: args.guest_module_make.clone(),
        }),
        disks: args.disk.clone(),
        memory_mib: args.memory,
        cpus: args.cpus,
        qemu_args: args.qemu.clone(),
        kernel_options: args.append.join(" "),
        verbose: args.verbose,
        exitless: Some(programs.exitless),
        exitless_lab: Some(programs.exitless_lab),
        ..LabConfig::default()
    }
}

/// Prints what is removed on standard output.
fn prune(dry_run: bool) -> anyhow::Result<u8> {
    let pruned = lab::prune::prune(&lab::build::programs_dir(), dry_run)?;
    for path in &pruned.kept {
        println!("kept, used within the last hour: {}", path.display());
    }
    let verb = if dry_run { "would remove" } else { "removed" };
    for (path, bytes) in &pruned.gone {
        println!("{verb} {} ({} MiB)", path.display(), bytes >> 20);
    }
    let verb = if dry_run { "would be freed" } else { "freed" };
    println!("{} MiB {verb}", pruned.bytes() >> 20);
    Ok(0)
}

/// Returns the command to start inside.
fn command<'a>(args: &LabArgs, lab: &'a Lab) -> lab::LabCommand<'a> {
    if args.shell {
        return lab.command("/bin/sh");
    }
    match args.args.split_first() {
        Some((program, rest)) if args.exec => lab.command(program).args(rest),
        _ => lab.command("/bin/exitless").args(&args.args),
    }
}

fn limit(args: &LabArgs, default: Duration) -> Duration {
    args.timeout.map_or(default, Duration::from_secs)
}

/// Runs the command with our input and outputs.
fn batch(args: &LabArgs, lab: &Lab) -> Result<u8, LabError> {
    let running = command(args, lab).spawn()?;
    feed(&running);
    let output = running.wait(limit(args, Duration::from_secs(300)), |stream, data| {
        // The end of a reader does not end the command.
        let _ = match stream {
            Stream::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(data).and_then(|()| out.flush())
            }
            Stream::Stderr => io::stderr().write_all(data),
        };
    })?;
    if is_processors_fault(&output.stderr_text()) {
        eprintln!("lab: {MAY_BE_THE_LABS}");
    }
    Ok(output.status)
}

/// Returns whether a guest ended in a triple fault, by the output of `run`, or the lab in a panic,
/// by its console.
fn is_processors_fault(text: &str) -> bool {
    text.contains("triple fault")
        || text.contains("Kernel panic - not syncing: Fatal exception in interrupt")
}

/// Sends our standard input to the command, from a thread that ends with this process.
fn feed(running: &Running<'_>) {
    let send = running.stdin_writer();
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        loop {
            // An empty message ends the command's input, as an empty read marks the end of ours.
            let count = io::stdin().read(&mut buffer).unwrap_or(0);
            if send(&buffer[..count]).is_err() || count == 0 {
                return;
            }
        }
    });
}

/// Gives the command the lab's terminal, and connects that with ours. The returned thread shows its
/// output until the lab ends.
fn interact(args: &LabArgs, lab: &mut Lab) -> anyhow::Result<(u8, JoinHandle<()>)> {
    let terminal = lab
        .take_terminal()
        .context("the lab's terminal is given out once")?;
    let raw = terminal::RawMode::enter();
    let mut from_lab = terminal.try_clone().context("the lab's terminal")?;
    let mut to_lab = terminal;
    let mut keys = terminal::input().context("standard input")?;
    thread::spawn(move || io::copy(&mut keys, &mut to_lab));
    let screen = thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from_lab.read(&mut buffer) {
            let mut out = io::stdout().lock();
            if out
                .write_all(&buffer[..count])
                .and_then(|()| out.flush())
                .is_err()
            {
                return;
            }
        }
    });
    let running = command(args, lab).on_terminal().spawn()?;
    let output = running.wait(limit(args, SHELL_LIMIT), |_, _| {})?;
    drop(raw);
    Ok((output.status, screen))
}

/// Parses `FILE[:PATH]`; PATH may be a directory (it ends with `/`) or relative to /root.
fn put_paths(text: &str) -> anyhow::Result<(PathBuf, String)> {
    let (host, inside) = text.split_once(':').unwrap_or((text, ""));
    let name = file_name(host)?;
    let path = match inside {
        "" => name.to_owned(),
        dir if dir.ends_with('/') => format!("{dir}{name}"),
        path => path.to_owned(),
    };
    let path = if path.starts_with('/') {
        path
    } else {
        format!("/root/{path}")
    };
    Ok((PathBuf::from(host), path))
}

/// Parses `PATH[:FILE]`; PATH may be relative to /root, FILE a directory.
fn get_paths(text: &str) -> anyhow::Result<(String, PathBuf)> {
    let (inside, host) = text.split_once(':').unwrap_or((text, ""));
    let name = file_name(inside)?;
    let host = match host {
        "" => PathBuf::from(name),
        dir if Path::new(dir).is_dir() => Path::new(dir).join(name),
        file => PathBuf::from(file),
    };
    let inside = if inside.starts_with('/') {
        inside.into()
    } else {
        format!("/root/{inside}")
    };
    Ok((inside, host))
}

fn file_name(path: &str) -> anyhow::Result<&str> {
    let name = Path::new(path).file_name().and_then(|name| name.to_str());
    name.with_context(|| format!("{path:?} names no file"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: LabArgs,
    }

    fn programs() -> Programs {
        Programs {
            exitless: "exitless".into(),
            exitless_lab: "exitless-lab".into(),
        }
    }

    #[test]
    fn options_of_the_hosts_kernel_are_appended_in_their_order() {
        let config_of = |line: &[&str]| {
            let line = ["lab"].iter().chain(line).chain(&["--", "doctor"]);
            let cli = Cli::try_parse_from(line).expect("a command line");
            config(&cli.args, programs())
        };
        assert_eq!(config_of(&[]).kernel_options, "");
        let strict = "intel_iommu=on iommu.strict=1";
        let config = config_of(&["--append", strict, "--append", "-x"]);
        assert_eq!(config.kernel_options, "intel_iommu=on iommu.strict=1 -x");
    }

    #[test]
    fn a_guests_module_is_built_with_variables_of_make() {
        let line = |more: &[&'static str]| {
            let line = ["lab"].iter().chain(more).chain(&["--", "doctor"]);
            Cli::try_parse_from(line).map(|cli| config(&cli.args, programs()).guest_module)
        };
        assert_eq!(line(&[]).expect("a command line"), None);
        let given = [
            "--guest-module",
            "m",
            "--guest-module-make",
            "A=1",
            "--guest-module-make",
            "B=-x",
        ];
        let expected = ModuleSources {
            dir: "m".into(),
            variables: vec!["A=1".into(), "B=-x".into()],
        };
        assert_eq!(line(&given).expect("a command line"), Some(expected));
        assert!(line(&given[2..]).is_err(), "of no module");
        assert!(Cli::try_parse_from(["lab", "--guest-module", "m", "--prune"]).is_err());
    }

    #[test]
    fn put_defaults_to_the_working_directory_inside() {
        let put = |text: &str| put_paths(text).unwrap().1;
        assert_eq!(put("images/disk.img"), "/root/disk.img");
        assert_eq!(put("disk.img:a/b"), "/root/a/b");
        assert_eq!(put("disk.img:/mnt/x"), "/mnt/x");
        assert_eq!(put("disk.img:/mnt/"), "/mnt/disk.img");
        assert_eq!(
            put_paths("images/disk.img:x").unwrap().0,
            Path::new("images/disk.img")
        );
        assert!(put_paths(":x").is_err() && put_paths("..").is_err());
    }

    #[test]
    fn processor_faults_are_distinguished_from_a_guests_own_end() {
        let ended = "exitless: vCPU 1: triple fault (on AMD the registers are those after a \
             reset)\n  rip 0\n";
        let panicked = "[   57.2] Kernel panic - not syncing: Fatal exception in interrupt\n\
             [   57.3] Kernel Offset: disabled";
        assert!(is_processors_fault(ended) && is_processors_fault(panicked));
        assert!(!is_processors_fault("exitless: the guest powered off\n"));
        assert!(!is_processors_fault(
            "Kernel panic - not syncing: Out of memory"
        ));
    }

    #[test]
    fn get_defaults_to_the_working_directory_here() {
        let get = |text: &str| get_paths(text).unwrap();
        assert_eq!(
            get("out.json"),
            ("/root/out.json".into(), "out.json".into())
        );
        assert_eq!(get("/var/log/x:y"), ("/var/log/x".into(), "y".into()));
        assert_eq!(get("/var/log/x:/tmp").1, Path::new("/tmp/x"));
    }
}
