//! One run of a stock guest: its configuration, and its result.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::host::{Host, Program};
use super::programs::Exitless;

/// Access of the guest to the IOMMU's registers, or no IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No IOMMU.
    None,
    /// Registers exit to the VMM.
    Trap,
    /// Reads do not exit, writes are logged by the kernel.
    Logged,
    /// Plain memory.
    Shared,
    /// Paravirtual: virtio-iommu.
    Virtio,
}

impl Mode {
    /// No IOMMU, and the three of VT-d.
    pub const ALL: [Mode; 4] = [Mode::None, Mode::Trap, Mode::Logged, Mode::Shared];
    /// The three of VT-d.
    pub const VTD: [Mode; 3] = [Mode::Trap, Mode::Logged, Mode::Shared];

    /// Returns its name in tables, keys and flags.
    pub fn name(self) -> &'static str {
        match self {
            Mode::None => "none",
            Mode::Trap => "trap",
            Mode::Logged => "logged",
            Mode::Shared => "shared",
            Mode::Virtio => "virtio",
        }
    }
}

/// System that a guest boots in place of the lab's own initramfs.
#[derive(Clone, Debug)]
pub struct System {
    /// Its kernel, a path that `run` can read.
    pub kernel: String,
    /// Its initrd, likewise.
    pub initrd: String,
    /// Its kernel's command line, without the console and `iommu.strict`.
    pub options: String,
}

/// A guest to be run: its machine, and the shell script it runs before it powers off.
#[derive(Clone, Debug)]
pub struct Guest {
    /// System that it boots in place of the script.
    pub system: Option<System>,
    /// Path of a kernel that `run` can read, in place of the stock bzImage.
    pub kernel: Option<String>,
    /// IOMMU and register mode.
    pub mode: Mode,
    /// Its driver for a paravirtual IOMMU.
    pub driver: Driver,
    /// Whether it has `iommu.strict=1`; without it the kernel has the distribution's policy, which
    /// is lazy invalidation in Debian.
    pub is_strict: bool,
    /// `--memory`: 256 MiB.
    pub memory: &'static str,
    /// Number of vCPUs.
    pub cpus: u32,
    /// `--idle`.
    pub idle: &'static str,
    /// Whether neither `--iommu-mode` nor `--idle` is given: the run has the program's defaults,
    /// and `mode` and `idle` are names only.
    pub takes_defaults: bool,
    /// Values of `--disk`.
    pub disks: Vec<String>,
    /// Values of `--net`.
    pub nets: Vec<String>,
    /// Further flags of `run`.
    pub flags: Vec<String>,
    /// Values of `--fault`; with any, the program is the lab's.
    pub faults: Vec<String>,
    /// Program that runs a guest without faults.
    pub program: Exitless,
    /// Further words on the kernel's command line.
    pub kernel_options: String,
    /// Script that the guest runs.
    pub script: String,
    /// Time within which it must end.
    pub limit: Duration,
    /// Host CPUs of its sidecore and its vCPUs, unless the host chooses.
    pub pin: Option<String>,
    /// Whether a reset starts its machine again; otherwise it ends the run, so that a guest that
    /// crashes is not run for ever.
    pub restarts: bool,
    /// Suffix that distinguishes its files from those of a guest beside it with the same mode and
    /// idle policy.
    pub name: String,
    /// Directory of the control group that it runs in: in the lab only.
    pub group: Option<String>,
}

/// Driver of a guest's paravirtual IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Linux's own.
    Stock,
    /// This workspace's module, with these parameters: `NAME=VALUE` each.
    Module(&'static [&'static str]),
}

impl Driver {
    /// Returns its options on the kernel's command line.
    fn options(self) -> String {
        match self {
            Self::Stock => " exitless.iommu=stock".into(),
            Self::Module(parameters) => {
                let of = |parameter| format!(" exitless_iommu.{parameter}");
                let parameters: String = parameters.iter().map(of).collect();
                format!(" exitless.iommu=module{parameters}")
            }
        }
    }
}

impl Guest {
    /// Creates a guest with one vCPU, strict, polling, no devices.
    pub fn new(mode: Mode, script: impl Into<String>) -> Self {
        Self {
            system: None,
            kernel: None,
            mode,
            driver: Driver::Stock,
            is_strict: true,
            memory: "256M",
            cpus: 1,
            idle: "poll",
            takes_defaults: false,
            disks: Vec::new(),
            nets: Vec::new(),
            flags: Vec::new(),
            faults: Vec::new(),
            program: Exitless::Product,
            kernel_options: String::new(),
            script: script.into(),
            limit: Duration::from_secs(120),
            pin: None,
            restarts: false,
            name: String::new(),
            group: None,
        }
    }

    /// Returns the program that runs it.
    pub fn program(&self) -> Exitless {
        match self.faults.is_empty() {
            true => self.program,
            false => Exitless::Lab,
        }
    }

    /// Returns the arguments of the program.
    fn args(&self, host: &Host) -> Result<Vec<String>> {
        let mut args: Vec<String> = vec!["run".into()];
        let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
        let (kernel, initrd) = match &self.system {
            None => {
                let stock = || host.kernel();
                (self.kernel.clone().unwrap_or_else(stock), host.initrd())
            }
            Some(system) => (system.kernel.clone(), system.initrd.clone()),
        };
        flag("--kernel", kernel);
        flag("--initrd", initrd);
        flag("--memory", self.memory.into());
        flag("--cpus", self.cpus.to_string());
        for (name, value) in self.choices() {
            flag(name, value.into());
        }
        if matches!(host, Host::Lab(_)) {
            // Long: in the lab an emulated CPU may itself not run on its host's for some seconds.
            flag("--watchdog", "60".into());
        }
        if let Some(pin) = self.pin.as_deref().or(host.pin()) {
            flag("--pin", pin.to_owned());
        }
        for disk in &self.disks {
            flag("--disk", disk.clone());
        }
        for net in &self.nets {
            flag("--net", net.clone());
        }
        for fault in &self.faults {
            flag("--fault", fault.clone());
        }
        let on_reboot = if self.restarts { "restart" } else { "exit" };
        flag("--on-reboot", on_reboot.into());
        flag("--ledger", host.path(&self.ledger()));
        flag("--cmdline", self.command_line()?);
        args.extend(self.flags.iter().cloned());
        Ok(args)
    }

    /// Returns the flags that are given, rather than left to the program.
    fn choices(&self) -> Vec<(&'static str, &'static str)> {
        if self.takes_defaults {
            return Vec::new();
        }
        let iommu = match self.mode {
            Mode::None | Mode::Virtio => ("--iommu", self.mode.name()),
            mode => ("--iommu-mode", mode.name()),
        };
        vec![("--idle", self.idle), iommu]
    }

    /// Returns the kernel's command line.
    fn command_line(&self) -> Result<String> {
        // An option that is not given is the distribution's choice.
        let strict = if self.is_strict {
            " iommu.strict=1"
        } else {
            ""
        };
        if let Some(system) = &self.system {
            return Ok(format!("console=ttyS0 {}{strict}", system.options));
        }
        let run = lab::guest_image::run_option(&self.script)?;
        Ok(format!(
            "console=ttyS0 quiet panic=-1 cryptomgr.notests mitigations=off{strict}{} {} {run}",
            self.driver.options(),
            self.kernel_options
        ))
    }

    /// Returns the line of Linux's log on a guest's policy, strict or lazy.
    pub fn policy(is_strict: bool) -> &'static str {
        match is_strict {
            true => "DMA domain TLB invalidation policy: strict mode",
            false => "DMA domain TLB invalidation policy: lazy mode",
        }
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// The run failed, or the guest's script did; with the end of the console.
    pub fn run(&self, host: &Host) -> Result<Outcome> {
        let outcome = self.try_run(host)?;
        outcome.check().with_context(|| {
            format!("guest in mode {} with {} vCPU", self.mode.name(), self.cpus)
        })?;
        Ok(outcome)
    }

    /// Runs it to its end, whatever its status.
    pub fn try_run(&self, host: &Host) -> Result<Outcome> {
        self.spawn(host)?.wait()
    }

    /// Starts it. Guests that run side by side must differ in name, mode or idle policy, or they
    /// share a ledger.
    pub fn spawn<'a>(&self, host: &'a Host) -> Result<RunningGuest<'a>> {
        Ok(RunningGuest {
            program: host.spawn_in(
                self.group.as_deref(),
                self.program(),
                &self.args(host)?,
                self.limit,
            )?,
            host,
            ledger: self.ledger(),
        })
    }

    /// Returns the name of the ledger's file.
    fn ledger(&self) -> String {
        format!(
            "ledger-{}-{}{}.json",
            self.mode.name(),
            self.idle,
            self.name
        )
    }
}

/// A running guest.
pub struct RunningGuest<'a> {
    program: Program<'a>,
    host: &'a Host,
    ledger: String,
}

impl RunningGuest<'_> {
    /// Waits until its console shows `text`.
    pub fn wait_for(&mut self, text: &str) -> Result<()> {
        self.program.wait_for(text)
    }

    /// Waits for a whole line of its console that contains `text`. Returns the line from there to
    /// its end.
    pub fn wait_for_line(&mut self, text: &str) -> Result<String> {
        self.program.wait_for_line(text)
    }

    /// Returns whether its console shows `text` within `time`.
    ///
    /// # Errors
    /// It ended before that.
    pub fn writes_within(&mut self, time: Duration, text: &str) -> Result<bool> {
        self.program.writes_within(time, text)
    }

    /// Returns its console's output so far.
    pub fn so_far(&self) -> String {
        self.program.so_far()
    }

    /// Types text on its console.
    pub fn type_in(&mut self, text: &str) -> Result<()> {
        self.program.type_in(text)
    }

    /// Stops the whole process.
    pub fn pause(&self) -> Result<()> {
        self.program.pause()
    }

    /// Resumes it.
    pub fn resume(&self) -> Result<()> {
        self.program.resume()
    }

    /// Sends its VMM a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        self.program.signal(signal)
    }

    /// Asks its VMM to end, as a service manager does.
    pub fn terminate(&self) -> Result<()> {
        self.program.terminate()
    }

    /// Sets the time within which it must end, or print an awaited text, from now on.
    pub fn set_limit(&mut self, limit: Duration) {
        self.program.set_limit(limit);
    }

    /// Waits for its end, whatever its status.
    pub fn wait(self) -> Result<Outcome> {
        let output = self.program.wait()?;
        let console = output.stdout_text();
        let ledger = match self.host.get(&self.ledger) {
            Ok(bytes) => serde_json::from_slice(&bytes).context("reading the ledger")?,
            Err(_) => Value::Null,
        };
        Ok(Outcome {
            exit: output.status,
            script: lab::guest_image::run_status(&console),
            console,
            log: output.stderr_text(),
            ledger,
        })
    }
}

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Exit status of `exitless run`.
    pub exit: u8,
    /// Exit status of the guest's script, if it has ended.
    pub script: Option<u8>,
    /// The guest's console.
    pub console: String,
    /// Output of `exitless run`.
    pub log: String,
    /// The ledger.
    pub ledger: Value,
}

impl Outcome {
    /// Checks that both `exitless run` and the guest's script succeeded.
    ///
    /// # Errors
    /// A failure, with the end of console and log.
    pub fn check(&self) -> Result<()> {
        self.check_script(Some(0))
    }

    /// Checks that `exitless run` succeeded, and that the guest's script ended with this status, or
    /// did not end if it is `None`.
    ///
    /// # Errors
    /// A failure, with the end of console and log.
    pub fn check_script(&self, status: Option<u8>) -> Result<()> {
        ensure!(
            self.exit == 0 && self.script == status,
            "exitless ended with {}, the guest's script with {:?}\n{}",
            self.exit,
            self.script,
            self.tail(),
        );
        Ok(())
    }

    /// Returns the end of console and log, for an error.
    pub fn tail(&self) -> String {
        let last = |text: &str, lines: usize| {
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        };
        format!(
            "--- console\n{}\n--- log\n{}",
            last(&self.console, 25),
            last(&self.log, if self.exit == 131 { 60 } else { 15 })
        )
    }

    /// Returns the first console line that contains `text`.
    pub fn line(&self, text: &str) -> Option<&str> {
        self.console.lines().find(|line| line.contains(text))
    }

    /// Returns the windows that the guest has marked.
    pub fn windows(&self) -> &[Value] {
        self.ledger["windows"].as_array().map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_of_its_own_is_left_to_its_choice_of_policy() {
        let mut guest = Guest::new(Mode::Shared, "");
        guest.system = Some(System {
            kernel: "/k".into(),
            initrd: "/i".into(),
            options: "root=/dev/vda ro".into(),
        });
        let line = |guest: &Guest| guest.command_line().expect("it has no script");
        assert_eq!(
            line(&guest),
            "console=ttyS0 root=/dev/vda ro iommu.strict=1"
        );
        guest.is_strict = false;
        assert_eq!(line(&guest), "console=ttyS0 root=/dev/vda ro");
    }

    #[test]
    fn a_guest_with_defaults_is_given_neither_mode_nor_policy() {
        let mut guest = Guest::new(Mode::Trap, "true");
        assert_eq!(
            guest.choices(),
            [("--idle", "poll"), ("--iommu-mode", "trap")]
        );
        assert!(guest.command_line().unwrap().contains(" iommu.strict=1 "));
        guest.takes_defaults = true;
        guest.is_strict = false;
        assert_eq!(guest.choices(), []);
        assert!(!guest.command_line().unwrap().contains("iommu.strict"));
    }
}
