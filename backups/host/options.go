package host

import (
	"log/slog"
	"runtime"
	"time"

	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/block"
)

// settingPlaces is the setting with the number of backups that the node makes at once.
const settingPlaces = "concurrent-backups-per-node"

// Options of the host. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// Version of Drover, for the snapshots of repositories.
	Version string
	// Memory bounds the packs of all backups that the node makes at once, in bytes; 256 MiB.
	Memory int64
	// RetryMin and RetryMax bound the pause after a failure, which doubles with each failure: 5 s to 5 min.
	RetryMin, RetryMax time.Duration
	// ProgressEvery is the interval between two reports of the progress; 500 ms.
	ProgressEvery time.Duration
	// Targets are the options of the work for BackupTargets. Log is the same by default.
	Targets targets.Options
	// CollectEvery is the interval between two looks for holds without a backup; 10 min.
	CollectEvery time.Duration
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Targets.Log == nil {
		o.Targets.Log = o.Log
	}
	if o.Memory <= 0 {
		o.Memory = repo.DefaultMemory
	}
	if o.RetryMin <= 0 {
		o.RetryMin = 5 * time.Second
	}
	if o.RetryMax <= 0 {
		o.RetryMax = 5 * time.Minute
	}
	if o.ProgressEvery <= 0 {
		o.ProgressEvery = 500 * time.Millisecond
	}
	if o.CollectEvery <= 0 {
		o.CollectEvery = 10 * time.Minute
	}
	return o
}

const (
	packsPerBackup = 4       // so that two are sent while others are filled
	smallestPack   = 4 << 20 // a pack has room for a chunk
	mostWorkers    = 16
)

// shareMemory gives a backup its share of the node's memory.
func shareMemory(o *mover.BackupOptions, memory int64, places int) {
	share := memory / int64(places)
	size := min(max(share/packsPerBackup, smallestPack), repo.DefaultPackSize)
	o.Writer.PackSize = int(size) / block.Size * block.Size
	o.Writer.Memory = max(share, packsPerBackup*size)
	o.Workers = min(2*runtime.GOMAXPROCS(0), mostWorkers)
}
