//! A forward-only reader over untrusted bytes. No read or skip leaves the slice.

/// The bytes ended early, or a length does not fit the address space. The value is the offset where it happened.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutOfBounds(pub(super) usize);

#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], position: usize) -> Self {
        Self { bytes, position }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], OutOfBounds> {
        let out_of_bounds = OutOfBounds(self.position);
        let end = usize::try_from(len)
            .ok()
            .and_then(|len| self.position.checked_add(len));
        let Some(end) = end else {
            return Err(out_of_bounds);
        };
        let taken = self.bytes.get(self.position..end).ok_or(out_of_bounds)?;
        self.position = end;
        Ok(taken)
    }

    pub(super) fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN], OutOfBounds> {
        let position = self.position;
        let bytes = self.take(LEN as u64)?;
        bytes.try_into().map_err(|_| OutOfBounds(position))
    }

    pub(super) fn u32(&mut self) -> Result<u32, OutOfBounds> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, OutOfBounds> {
        self.array().map(u64::from_le_bytes)
    }

    /// A string: u64 byte length, then the bytes. Their encoding is left to the caller.
    pub(super) fn string(&mut self) -> Result<&'a [u8], OutOfBounds> {
        let len = self.u64()?;
        self.take(len)
    }
}
