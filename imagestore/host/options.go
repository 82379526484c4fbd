package host

import (
	"crypto/tls"
	"log/slog"
	"net"
	"time"

	"drover.io/drover/block/wire"
	originhttp "drover.io/drover/imagestore/origin/http"
)

// Settings of the host.
const (
	settingVerify = "backing-image-verify-interval" // hours
	settingSends  = "concurrent-image-copies-per-sender"
)

// Options of the node role. The zero value of each field but Log stands for its default.
type Options struct {
	Log *slog.Logger
	// UploadListen is the address that uploads are taken on; 127.0.0.1:0. UploadHost is the name or address that users
	// reach it by; default: the one listened on.
	UploadListen, UploadHost string
	// UploadCert makes uploads come over TLS; nil: without. UploadCA is the authority (PEM) by which users know it.
	UploadCert *tls.Certificate
	UploadCA   []byte
	// UploadTimeout is how long a sender may take to come back; 5 min.
	UploadTimeout time.Duration
	// Parallel is how many transfers run at once; 3. An upload that nobody sends yet does not count.
	Parallel int
	// RetryMin and RetryMax bound the pause after a failure, which doubles: 5 s to 5 min.
	RetryMin, RetryMax time.Duration
	// ProgressEvery is how often it is told how far a transfer is; 500 ms.
	ProgressEvery time.Duration
	// CheckEvery is how often a ready copy is looked at: whether its files are there, and untouched; 1 min.
	CheckEvery time.Duration
	// CheckpointEvery is how often what a download brought is made durable, to go on from there after a restart; 10 s.
	CheckpointEvery time.Duration
	// Identity and Layers, if set, let other nodes read the finished layers on this node's disks there, and this node
	// those of others.
	Identity *wire.Identity
	Layers   net.Listener
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
