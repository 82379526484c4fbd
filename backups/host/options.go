package host

import (
	"context"
	"log/slog"
	"runtime"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api/watch"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/block"
	"drover.io/drover/block/pace"
)

// settingPlaces is the setting with the number of backups that the node makes at once.
const settingPlaces = "concurrent-backups-per-node"

// settingGuestSpeed is the setting with the part of their speed that guests keep, in percent.
const settingGuestSpeed = "backup-guest-speed-percentage"

// Options of the host. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// Version of Drover, for the snapshots of repositories.
	Version string
	// Guests counts the requests of the node's volumes; nil: backups and heals never wait for guests.
	Guests func(context.Context) (pace.GuestIO, error)
	// Memory bounds the buffers of all backups and restores of the node, in bytes; 256 MiB.
	Memory int64
	// RetryMin and RetryMax bound the pause after a failure, which doubles with each failure: 5 s to 5 min.
	RetryMin, RetryMax time.Duration
	// ProgressEvery is the interval between two reports of the progress; 500 ms.
	ProgressEvery time.Duration
	// Targets are the options of the work for BackupTargets. Log is the same by default.
	Targets targets.Options
	// OpenDisk opens the disk inside the file of an image of Longhorn, as longhorn.Images has it; nil: backups of Longhorn
	// above images are refused.
	OpenDisk func(file block.Source) (block.Source, error)
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

// NewPacer makes the backups and heals of the node wait for guests.
func (o Options) NewPacer(c client.Reader) *pace.Pacer {
	if o.Guests == nil {
		return nil
	}
	o = o.withDefaults()
	return pace.New(pace.Options{Guests: o.Guests, Keep: func(ctx context.Context) float64 {
		return float64(min(watch.SettingNumber(ctx, c, settingGuestSpeed, o.Log), 95)) / 100
	}, Rested: func(d time.Duration) { backupPauses.Add(d.Seconds()) }})
}

const (
	packsPerBackup = 4       // so that two are sent while others are filled
	smallestPack   = 4 << 20 // a pack has room for a chunk
	mostWorkers    = 16
	restorePart    = 4 // a part of the memory is left to restores, as a divisor
	secondsAPack   = 4 // a pack is sent at once, also below a limit of the upload rate
)

// ForTargets are the options of the work for BackupTargets. Restores make so many large requests at once as have room
// in their part of the memory: each has its bytes as the store returned them, and a chunk of plain bytes.
func (o Options) ForTargets() targets.Options {
	o = o.withDefaults()
	o.Targets.Runs = max(int(o.Memory/restorePart/(repo.RunLength+block.ChunkSize)), 1)
	return o.Targets
}

// shareMemory gives a backup its share of the node's memory. rate is the limit of the upload rate; 0: none.
func shareMemory(o *mover.BackupOptions, memory int64, places int, rate int64) {
	o.Workers = min(2*runtime.GOMAXPROCS(0), mostWorkers)
	share := (memory - memory/restorePart) / int64(places)
	share -= int64(o.Workers) * block.ChunkSize
	size := min(max(share/packsPerBackup, smallestPack), repo.DefaultPackSize)
	if rate > 0 {
		size = min(size, max(rate*secondsAPack, smallestPack))
	}
	o.Writer.PackSize = int(size) / block.Size * block.Size
	o.Writer.Memory = packsPerBackup * size
}
