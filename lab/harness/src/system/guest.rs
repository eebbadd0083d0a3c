//! One run of a stock guest: what it is given, and what it leaves behind.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::host::{Host, Program};
use super::programs::Exitless;

/// How the guest reaches the IOMMU's registers, or that it has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No IOMMU.
    None,
    /// Registers exit to the VMM.
    Trap,
    /// Reads are free, writes are logged by the kernel.
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

    /// Name in tables, keys and flags.
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

/// What a guest boots in place of the lab's own initramfs.
#[derive(Clone, Debug)]
pub struct System {
    /// Its kernel, where `run` sees it.
    pub kernel: String,
    /// Its initrd, likewise.
    pub initrd: String,
    /// Its kernel's command line but for the console and `iommu.strict`.
    pub options: String,
}

/// A guest to be run: its machine, and the shell script it runs before it powers off.
#[derive(Clone, Debug)]
pub struct Guest {
    /// It boots this rather than run a script.
    pub system: Option<System>,
    /// A kernel where `run` sees it, in place of the stock bzImage.
    pub kernel: Option<String>,
    /// IOMMU and register mode.
    pub mode: Mode,
    /// Its driver for a paravirtual IOMMU.
    pub driver: Driver,
    /// `iommu.strict=1`, or nothing: the distribution's choice, which is lazy invalidation in
    /// Debian.
    pub is_strict: bool,
    /// `--memory`: 256 MiB.
    pub memory: &'static str,
    /// vCPUs.
    pub cpus: u32,
    /// `--idle`.
    pub idle: &'static str,
    /// Neither `--iommu-mode` nor `--idle` is given: the run has the program's own, and `mode` and
    /// `idle` are names only.
    pub takes_defaults: bool,
    /// Values of `--disk`.
    pub disks: Vec<String>,
    /// Values of `--net`.
    pub nets: Vec<String>,
    /// Further flags of `run`.
    pub flags: Vec<String>,
    /// Values of `--fault`; with any, the program is the lab's.
    pub faults: Vec<String>,
    /// The program, of a guest without faults.
    pub program: Exitless,
    /// Further words on the kernel's command line.
    pub kernel_options: String,
    /// What the guest does.
    pub script: String,
    /// It has to end within this.
    pub limit: Duration,
    /// Host CPUs of its sidecore and its vCPUs, where they are not the host's choice.
    pub pin: Option<String>,
    /// A reset starts its machine again; else it ends the run, so that a guest that crashes is not
    /// run for ever.
    pub restarts: bool,
    /// Tells its files from those of guests beside it that are alike in mode and idle policy.
    pub name: String,
    /// Directory of the control group that it runs in: in the lab only.
    pub group: Option<String>,
}

/// The driver of a guest's paravirtual IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Linux's own.
    Stock,
    /// This workspace's module, with these parameters: `NAME=VALUE` each.
    Module(&'static [&'static str]),
}

impl Driver {
    /// What says so on the kernel's command line.
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
    /// One vCPU, strict, polling, no devices.
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

    /// The program that runs it.
    pub fn program(&self) -> Exitless {
        match self.faults.is_empty() {
            true => self.program,
            false => Exitless::Lab,
        }
    }

    /// The arguments of the program.
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
            // Seconds mean nothing there: an emulated CPU may itself be off its host's for some of
            // them.
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

    /// The flags that are said or left to the program.
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

    /// The kernel's command line.
    fn command_line(&self) -> Result<String> {
        // What is not said is the distribution's choice.
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

    /// What Linux's log says of a guest's policy, strict or lazy.
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

    /// Runs it to its end, whatever that is.
    pub fn try_run(&self, host: &Host) -> Result<Outcome> {
        self.spawn(host)?.wait()
    }

    /// Starts it. Guests that run side by side differ in name, mode or idle policy, or share a
    /// ledger.
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

    /// Name of the ledger's file.
    fn ledger(&self) -> String {
        format!(
            "ledger-{}-{}{}.json",
            self.mode.name(),
            self.idle,
            self.name
        )
    }
}

/// A guest that has been started.
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

    /// Waits for a whole line of its console that contains `text`; from there to its end.
    pub fn wait_for_line(&mut self, text: &str) -> Result<String> {
        self.program.wait_for_line(text)
    }

    /// Whether its console shows `text` within `time`.
    ///
    /// # Errors
    /// It ended without.
    pub fn writes_within(&mut self, time: Duration, text: &str) -> Result<bool> {
        self.program.writes_within(time, text)
    }

    /// What its console has shown so far.
    pub fn so_far(&self) -> String {
        self.program.so_far()
    }

    /// Types on its console.
    pub fn type_in(&mut self, text: &str) -> Result<()> {
        self.program.type_in(text)
    }

    /// Stops it as a whole.
    pub fn pause(&self) -> Result<()> {
        self.program.pause()
    }

    /// Lets it go on.
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

    /// It has to end, or to write what is waited for, within this from now on.
    pub fn set_limit(&mut self, limit: Duration) {
        self.program.set_limit(limit);
    }

    /// Waits for its end, whatever that is.
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

/// What a run left behind.
#[derive(Debug)]
pub struct Outcome {
    /// Exit status of `exitless run`.
    pub exit: u8,
    /// Exit status of the guest's script, if it came so far.
    pub script: Option<u8>,
    /// The guest's console.
    pub console: String,
    /// What `exitless run` said.
    pub log: String,
    /// The ledger.
    pub ledger: Value,
}

impl Outcome {
    /// Both `exitless run` and the guest's script ended well.
    ///
    /// # Errors
    /// With the end of console and log.
    pub fn check(&self) -> Result<()> {
        self.check_script(Some(0))
    }

    /// `exitless run` ended well, and the guest's script with this status, if it is to have come so
    /// far.
    ///
    /// # Errors
    /// With the end of console and log.
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

    /// The end of console and log, for an error.
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

    /// The first console line that contains `text`.
    pub fn line(&self, text: &str) -> Option<&str> {
        self.console.lines().find(|line| line.contains(text))
    }

    /// Windows the guest has marked.
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
