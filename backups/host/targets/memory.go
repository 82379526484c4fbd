package targets

import (
	"drover.io/drover/backups/repo"
	"drover.io/drover/block"
	"drover.io/drover/block/budget"
)

// Sizes of a node's memory, in bytes.
const (
	defaultMemory = 256 << 20
	leastMemory   = 192 << 20 // below, a part has no room for its work
	// sharedBlocks bounds the blocks of Longhorn's backups that are read on demand. They stay while a backup is open, so
	// they are no part of the memory.
	sharedBlocks = 48 << 20
)

// Memory is the memory of all backups, restores, copies, sweeps, heals and verifications of a node. A request to a
// store reserves Readers if readers of a restored volume wait for it, Moves if the bytes go into a pack that may wait
// for another store, else Reads. A session, except for a backup, reserves its buffers and packs when it begins to write
// packs. The holder of a session's memory may wait for a request, and the holder of Moves for packs of its own session;
// others wait for nothing.
type Memory struct {
	Budget                              *budget.Budget
	Readers, Reads, Moves               *budget.Part
	Backups, Copies, Maintenance, Heals *budget.Part
}

// NewMemory divides size bytes, at least 192 MiB; 0: 256 MiB.
func NewMemory(size int64) *Memory {
	if size <= 0 {
		size = defaultMemory
	}
	size = max(size, leastMemory)
	b, part := budget.New(size), size/32
	return &Memory{Budget: b, Readers: b.NewPart(2 * part), Reads: b.NewPart(5 * part), Moves: b.NewPart(2 * part),
		Copies: b.NewPart(4 * part), Maintenance: b.NewPart(3 * part), Heals: b.NewPart(2 * part),
		Backups: b.NewPart(14 * part)}
}

const (
	packsPerWriter = 4                   // so that two are sent while others are filled
	smallestPack   = 4 << 20             // a pack has room for a chunk
	smallestHeal   = 3 << 20             // of the packs of a heal: a chunk of 2 MiB
	healBuffers    = 2 * block.ChunkSize // which a heal reads at once
)

// WriterOf describes a Writer that reserves size bytes of a part. The session uses some of these bytes, as many as the
// parameter beside says, for buffers that hold no packs. No pack is larger than largest.
func WriterOf(part *budget.Part, size, beside, largest int64) repo.WriterOptions {
	packSize := max(min((size-beside)/packsPerWriter, largest), smallestPack)
	return repo.WriterOptions{PackSize: int(packSize) / block.Size * block.Size, Memory: packsPerWriter * packSize,
		Budget: part, Beside: beside}
}

// healWriter bounds the packs of a heal, which may take hours, and the chunks that it reads at once.
func (m *Memory) healWriter() repo.WriterOptions {
	packSize := max(min((m.Heals.Size()-healBuffers)/packsPerWriter, 8<<20), smallestHeal) / block.Size * block.Size
	return repo.WriterOptions{PackSize: int(packSize), Memory: packsPerWriter * packSize, Budget: m.Heals,
		Beside: healBuffers}
}

// maintenanceWriter bounds the packs with blobs that a verification or a sweep writes again.
func (m *Memory) maintenanceWriter() repo.WriterOptions {
	return WriterOf(m.Maintenance, m.Maintenance.Size(), 0, 8<<20)
}
