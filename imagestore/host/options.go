package host

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/wire"
	originhttp "drover.io/drover/imagestore/origin/http"
)

// Settings of the host.
const (
	settingVerify = "backing-image-verify-interval" // hours
	settingSends  = "concurrent-image-copies-per-sender"
)

// Options of the host. The zero value of a field stands for its default.
type Options struct {
	Log *slog.Logger
	// UploadListen is the address for uploads, default 127.0.0.1:0. UploadHost is the name or address in the URLs of
	// uploads, default the address of the listener.
	UploadListen, UploadHost string
	// UploadCert turns TLS on for uploads. UploadCA is the authority (PEM) by which senders know the certificate.
	UploadCert *tls.Certificate
	UploadCA   []byte
	// UploadTimeout is how long the host waits for a sender to continue after a cut; 5 min.
	UploadTimeout time.Duration
	// Parallel is how many transfers run at once; 3. An upload without a sender does not count.
	Parallel int
	// RetryMin and RetryMax bound the pause after a failure, which doubles with each failure: 5 s to 5 min.
	RetryMin, RetryMax time.Duration
	// ProgressEvery is the interval between two reports of the progress; 500 ms.
	ProgressEvery time.Duration
	// CheckEvery is the interval between two checks of the files of a ready copy; 1 min.
	CheckEvery time.Duration
	// CheckpointEvery is the interval between two checkpoints of an import or a copy; 10 s.
	CheckpointEvery time.Duration
	// Identity and Layers, if set, let other nodes read the layers on the disks of this node, and this node the layers of
	// other nodes.
	Identity *wire.Identity
	Layers   net.Listener
	// OpenBackup opens a backup by its URL, for images of the source restore; nil: there are none.
	OpenBackup func(ctx context.Context, url string) (block.Backup, error)
	// RestoreStall is how long a restore tries to continue without progress before it fails; 10 min.
	RestoreStall time.Duration
	// Download tunes downloads.
	Download originhttp.Options
}

func (o Options) withDefaults() Options {
	if o.UploadListen == "" {
		o.UploadListen = "127.0.0.1:0"
	}
	if o.Parallel <= 0 {
		o.Parallel = 3
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
	if o.CheckEvery <= 0 {
		o.CheckEvery = time.Minute
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}
