//! The threads that carry operations out.
//!
//! A read, and a write that needs no new clusters, run beside each other, so one that waits for the
//! disk delays no other. A write that needs clusters takes along the writes that wait behind it, up
//! to [`GROUP`]: they share the metadata's way to the file. A flush takes along all flushes that
//! wait.
//!
//! The library may panic over an image that it does not understand. That ends the image, not the
//! process: nothing is written any more, and everything is answered with EIO.

use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

use vio::blk::{Op, Outcome};

use crate::image::{Group, Image};
use crate::queue::{Job, Queue};

/// Most writes that share a flush of metadata. The first of them waits for the last.
const GROUP: usize = 32;

/// The life of a worker: until [`Queue::stop`].
pub(crate) fn run(queue: &Queue, image: &Image) {
    let mut batch = Vec::with_capacity(GROUP);
    while let Some(job) = queue.next() {
        // The job stays outside of what may unwind, so that it is answered in any case.
        batch.push((job, Outcome::Failed(libc::EIO)));
        if !queue.is_dead()
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| serve(queue, image, &mut batch)))
        {
            image.kill();
            queue.kill();
            tracing::error!(
                "the image library panicked, the disk {} is dead: {}",
                image.path().display(),
                message(&*panic)
            );
            for (_, outcome) in &mut batch {
                *outcome = Outcome::Failed(libc::EIO);
            }
        }
        queue.finish(batch.drain(..));
    }
}

/// Does the batch's one job, and perhaps more.
fn serve(queue: &Queue, image: &Image, batch: &mut Vec<(Job, Outcome)>) {
    let Some((job, outcome)) = batch.first_mut() else {
        return;
    };
    let done = match job.op {
        Op::Read { offset, .. } => image.read(offset, &mut job.data),
        Op::Write {
            offset, durable, ..
        } => match image.overwrite(offset, &job.data) {
            Ok(true) => sync_if(image, durable),
            Ok(false) => return serve_group(queue, image, batch),
            Err(error) => Err(error),
        },
        Op::Flush => {
            // One does for all of them: what each has to make stable had ended before it was
            // submitted.
            queue.take_flushes(batch);
            return answer_all(image, batch, &image.flush());
        }
        Op::Discard { offset, len } => image.discard(offset, len),
        Op::WriteZeroes { offset, len, unmap } => image.write_zeroes(offset, len, unmap),
    };
    *outcome = outcome_of(image, &done);
}

fn serve_group(queue: &Queue, image: &Image, batch: &mut Vec<(Job, Outcome)>) {
    let together = write_together(queue, image, batch);
    if together.is_ok() || batch.len() == 1 {
        return answer_all(image, batch, &together);
    }
    // Of what failed together nothing is reported done. By itself each has its own end.
    for (job, outcome) in batch {
        *outcome = outcome_of(image, &write_alone(image, job));
    }
}

/// Writes the batch, and what comes meanwhile.
fn write_together(queue: &Queue, image: &Image, batch: &mut Vec<(Job, Outcome)>) -> io::Result<()> {
    let mut group = image.group()?;
    let mut durable = false;
    let mut next = 0;
    while let Some((job, _)) = batch.get(next) {
        write(&mut group, job, &mut durable)?;
        next += 1;
        if batch.len() < GROUP
            && let Some(job) = queue.next_write()
        {
            batch.push((job, Outcome::Failed(libc::EIO)));
        }
    }
    group.flush()?;
    drop(group);
    sync_if(image, durable)
}

fn write_alone(image: &Image, job: &Job) -> io::Result<()> {
    let mut group = image.group()?;
    let mut durable = false;
    write(&mut group, job, &mut durable)?;
    group.flush()?;
    drop(group);
    sync_if(image, durable)
}

fn write(group: &mut Group<'_>, job: &Job, any_durable: &mut bool) -> io::Result<()> {
    let Op::Write {
        offset, durable, ..
    } = job.op
    else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    *any_durable |= durable;
    group.write(offset, &job.data)
}

fn sync_if(image: &Image, durable: bool) -> io::Result<()> {
    if durable { image.flush() } else { Ok(()) }
}

fn answer_all(image: &Image, batch: &mut [(Job, Outcome)], why: &io::Result<()>) {
    let answer = outcome_of(image, why);
    for (_, outcome) in batch {
        *outcome = answer;
    }
}

/// The library wraps errors in its own, which keep the kind and lose the number. Nothing is
/// answered with EOPNOTSUPP: to a driver that says that nothing was done, and an operation that
/// fails may have done a part.
fn outcome_of(image: &Image, done: &io::Result<()>) -> Outcome {
    let Err(error) = done else {
        return Outcome::Done;
    };
    let errno = error.raw_os_error().unwrap_or(match error.kind() {
        ErrorKind::StorageFull => libc::ENOSPC,
        ErrorKind::QuotaExceeded => libc::EDQUOT,
        ErrorKind::FileTooLarge => libc::EFBIG,
        ErrorKind::OutOfMemory => libc::ENOMEM,
        _ => libc::EIO,
    });
    image.explain(error, errno);
    match errno {
        libc::EOPNOTSUPP => Outcome::Failed(libc::EIO),
        errno => Outcome::Failed(errno),
    }
}

/// Returns the message of a panic.
pub(crate) fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
