//! One case of the self-test, without the guest that it boots.

use anyhow::Result;
use lab::packages::Version;

use crate::pviommu_lab::spec;
use crate::system::host::{GuestModule, Host, Kernels};

type Run = Box<dyn Fn(&Host) -> Result<String> + Send>;

/// One case. Its name says what it checks.
pub struct Case {
    /// Unique name, by which a soak records it.
    pub name: String,
    /// Whether it measures time: no other case may run meanwhile.
    pub is_alone: bool,
    /// Whether it takes several times as long as the others, and is started before them: the last
    /// case to end would leave a processor idle.
    pub is_long: bool,
    /// Kernels that it needs, the oldest, if the distribution's are not enough.
    pub needs: Kernels,
    run: Run,
}

impl Case {
    /// Creates a case of this name.
    pub(super) fn new(
        name: impl Into<String>,
        run: impl Fn(&Host) -> Result<String> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            is_alone: false,
            is_long: false,
            needs: Kernels::default(),
            run: Box::new(run),
        }
    }

    /// Makes it run with no other case beside it.
    pub(super) fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// Makes it start before the others.
    pub(super) fn long(mut self) -> Self {
        self.is_long = true;
        self
    }

    /// Makes it need a host kernel of this series at least.
    pub(super) fn needing(mut self, kernel: Version) -> Self {
        self.needs.both = Some(kernel);
        self
    }

    /// Makes it need a guest kernel of this series at least, if one is given, with this workspace's
    /// driver for virtio-iommu.
    pub(super) fn with_guests(mut self, kernel: Option<Version>) -> Self {
        self.needs.guest = kernel;
        self.needs.module = Some(GuestModule::Driver);
        self
    }

    /// Makes it need guests that have `guest/iommu-cases`.
    pub(super) fn with_spec_cases(mut self) -> Self {
        self.needs = spec::KERNELS;
        self
    }

    /// Makes it run on a kernel of this series, and adds that to its name.
    pub(super) fn on(mut self, kernel: Option<Version>) -> Self {
        if let Some(series) = kernel {
            self.name = format!("{} (Linux {series})", self.name);
        }
        self
    }

    /// Returns the kernels to run it with, in a suite whose kernels are of this series, if one is
    /// given.
    pub fn kernels(&self, series: Option<Version>) -> Kernels {
        let mut kernels = self.needs;
        if !Host::is_lab() {
            // This machine's kernel is fixed.
            kernels.both = None;
        }
        kernels.both = series.max(kernels.both);
        kernels.guest = kernels
            .guest
            .map(|guest| series.unwrap_or(guest).max(guest));
        kernels
    }

    /// Runs it. Returns a short description of the result.
    pub fn run(&self, host: &Host) -> Result<String> {
        (self.run)(host)
    }
}
