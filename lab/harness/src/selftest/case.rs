//! One case of the selftest, without what it boots.

use anyhow::Result;
use lab::packages::Version;

use crate::system::host::Host;

type Run = Box<dyn Fn(&Host) -> Result<String> + Send>;

/// One case: its name says what it shows.
pub struct Case {
    /// Unique; what a soak remembers it by.
    pub name: String,
    /// It measures time: nothing else is to run meanwhile.
    pub is_alone: bool,
    /// It takes several times as long as the others, and is begun before them: the last to end
    /// would leave a processor idle.
    pub is_long: bool,
    /// The oldest series of the host's kernel that has what it needs, if the distribution's has
    /// not.
    pub needs: Option<Version>,
    run: Run,
}

impl Case {
    /// A case of this name.
    pub(super) fn new(
        name: impl Into<String>,
        run: impl Fn(&Host) -> Result<String> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            is_alone: false,
            is_long: false,
            needs: None,
            run: Box::new(run),
        }
    }

    /// The same, with nothing else beside it.
    pub(super) fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// The same, begun before the others.
    pub(super) fn long(mut self) -> Self {
        self.is_long = true;
        self
    }

    /// The same where the host's kernel is of this series at least.
    pub(super) fn needing(mut self, kernel: Version) -> Self {
        self.needs = Some(kernel);
        self
    }

    /// The same on a kernel of this series, by name as well.
    pub(super) fn on(mut self, kernel: Option<Version>) -> Self {
        if let Some(series) = kernel {
            self.name = format!("{} (Linux {series})", self.name);
        }
        self
    }

    /// Runs it; answers a few words on what was seen.
    pub fn run(&self, host: &Host) -> Result<String> {
        (self.run)(host)
    }
}
