//! Frames between the lab's session on the real host and the agent inside the emulated one.
//!
//! One frame: payload length (`u32`), request number (`u32`), kind (`u8`), payload; little-endian.
//! A request number names one program or one file transfer; both ends work on many at a time. The
//! number 0 belongs to the connection itself. A frame that breaks the limits ends the connection:
//! both ends are built from this file, so it can only mean a torn stream.

use std::io::{self, Read, Write};

/// Longest payload of one frame, bytes. Longer data goes in several frames.
pub const MAX_PAYLOAD: usize = 1 << 18;

const HEADER: usize = 9;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Number of the program or transfer that it belongs to.
    pub id: u32,
    /// Its message.
    pub message: Message,
}

/// Message of a frame. *H* is sent by the host session, *A* by the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// A: ready for requests.
    Hello,
    /// H: start a program; answered by `Stdout`, `Stderr`… and `Exit`, or by `Refused`.
    Spawn(Spawn),
    /// H: bytes for the program's standard input; empty ends it.
    Stdin(Vec<u8>),
    /// H: send this signal to the program's process group.
    Signal(i32),
    /// A: bytes from standard output.
    Stdout(Vec<u8>),
    /// A: bytes from standard error.
    Stderr(Vec<u8>),
    /// A: the program ended and all its output has been sent; 128 + n for signal n.
    Exit(u8),
    /// H: create this file with these permission bits; `Data` follow, an empty one ends the file.
    /// Answered by `Done` or `Refused`.
    Push {
        /// Path inside.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// H: send this file; answered by `Data`… and an empty `Data`, or `Refused`.
    Pull(String),
    /// Contents of a file.
    Data(Vec<u8>),
    /// A: a push is complete.
    Done,
    /// A: the request failed.
    Refused(String),
    /// H: power the emulated host off.
    Shutdown,
}

/// A program to start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spawn {
    /// Program and arguments; the first must not be empty.
    pub argv: Vec<String>,
    /// Additional environment, `NAME=value`.
    pub env: Vec<String>,
    /// Working directory; empty for the default.
    pub cwd: String,
    /// Connect it to the lab's terminal (`/dev/hvc0`) rather than to frames.
    pub tty: bool,
}

impl Frame {
    /// Makes a frame.
    #[must_use]
    pub fn new(id: u32, message: Message) -> Self {
        Self { id, message }
    }

    /// Writes the frame with one `write_all`.
    ///
    /// # Errors
    /// The writer's own; `InvalidInput` for a payload above [`MAX_PAYLOAD`].
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = vec![0; HEADER];
        let kind = self.message.encode(&mut bytes);
        let len = bytes.len() - HEADER;
        if len > MAX_PAYLOAD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("payload of {len}"),
            ));
        }
        let len = u32::try_from(len).expect("MAX_PAYLOAD fits in 32 bits");
        bytes[..4].copy_from_slice(&len.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.id.to_le_bytes());
        bytes[8] = kind;
        out.write_all(&bytes)
    }

    /// Reads one frame; `None` when the stream ends between frames.
    ///
    /// # Errors
    /// The reader's own; `InvalidData` for a frame that breaks the format; `UnexpectedEof` within
    /// one.
    pub fn read(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER];
        loop {
            match input.read(&mut header[..1]) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        input.read_exact(&mut header[1..])?;
        let [l0, l1, l2, l3, i0, i1, i2, i3, kind] = header;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        if len > MAX_PAYLOAD {
            return Err(invalid(format!("frame of {len} bytes")));
        }
        let mut payload = vec![0; len];
        input.read_exact(&mut payload)?;
        Ok(Some(Self {
            id,
            message: Message::decode(kind, payload)?,
        }))
    }
}

impl Message {
    fn encode(&self, out: &mut Vec<u8>) -> u8 {
        match self {
            Self::Hello => 0,
            Self::Spawn(spawn) => {
                out.push(u8::from(spawn.tty));
                put_text(out, &spawn.cwd);
                put_list(out, &spawn.env);
                put_list(out, &spawn.argv);
                1
            }
            Self::Stdin(data) => put_bytes(out, data, 2),
            Self::Signal(signal) => put_bytes(out, &signal.to_le_bytes(), 3),
            Self::Stdout(data) => put_bytes(out, data, 4),
            Self::Stderr(data) => put_bytes(out, data, 5),
            Self::Exit(status) => put_bytes(out, &[*status], 6),
            Self::Push { path, mode } => {
                out.extend_from_slice(&mode.to_le_bytes());
                put_bytes(out, path.as_bytes(), 7)
            }
            Self::Pull(path) => put_bytes(out, path.as_bytes(), 8),
            Self::Data(data) => put_bytes(out, data, 9),
            Self::Done => 10,
            Self::Refused(reason) => put_bytes(out, reason.as_bytes(), 11),
            Self::Shutdown => 12,
        }
    }

    fn decode(kind: u8, payload: Vec<u8>) -> io::Result<Self> {
        let mut fields = Fields(&payload);
        Ok(match kind {
            0 => Self::Hello,
            1 => Self::Spawn(Spawn {
                tty: fields.byte()? != 0,
                cwd: fields.text()?,
                env: fields.list()?,
                argv: fields.list()?,
            }),
            2 => Self::Stdin(payload),
            3 => Self::Signal(i32::from_le_bytes(fields.word()?)),
            4 => Self::Stdout(payload),
            5 => Self::Stderr(payload),
            6 => Self::Exit(fields.byte()?),
            7 => {
                let mode = u32::from_le_bytes(fields.word()?);
                Self::Push {
                    mode,
                    path: utf8(fields.0.to_vec())?,
                }
            }
            8 => Self::Pull(utf8(payload)?),
            9 => Self::Data(payload),
            10 => Self::Done,
            11 => Self::Refused(utf8(payload)?),
            12 => Self::Shutdown,
            other => return Err(invalid(format!("frame of kind {other}"))),
        })
    }
}

fn put_bytes(out: &mut Vec<u8>, data: &[u8], kind: u8) -> u8 {
    out.extend_from_slice(data);
    kind
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_list(out: &mut Vec<u8>, list: &[String]) {
    let len = u32::try_from(list.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&len.to_le_bytes());
    for text in list {
        put_text(out, text);
    }
}

/// Unread rest of a payload.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take(&mut self, len: usize) -> io::Result<&[u8]> {
        let (head, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| invalid("field past the frame".into()))?;
        self.0 = rest;
        Ok(head)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn word(&mut self) -> io::Result<[u8; 4]> {
        let bytes = self.take(4)?;
        Ok([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn text(&mut self) -> io::Result<String> {
        let len = u32::from_le_bytes(self.word()?) as usize;
        utf8(self.take(len)?.to_vec())
    }

    fn list(&mut self) -> io::Result<Vec<String>> {
        // Each item takes at least 4 bytes of a payload of at most MAX_PAYLOAD, so a false count
        // runs into the end of the frame after at most 65,536 items.
        let count = u32::from_le_bytes(self.word()?);
        (0..count).map(|_| self.text()).collect()
    }
}

fn utf8(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|_| invalid("text that is not UTF-8".into()))
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests;
