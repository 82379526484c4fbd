package driver

import (
	"context"
	"errors"
	"path/filepath"
	"runtime/debug"

	"github.com/spf13/cobra"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// holdCommand only appears in the help: Main runs hold before any setup.
func holdCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "hold --socket PATH", Hidden: true,
		Short: "Keep the descriptors of devices while the data process restarts (started by serve)",
		RunE:  func(_ *cobra.Command, args []string) error { return runHold(args) },
	}
	c.Flags().String("socket", "", "socket to serve")
	return c
}

// runHold is the hold process. The process does as little as possible, for as long as possible.
func runHold(args []string) error {
	if len(args) != 2 || args[0] != "--socket" || !filepath.IsAbs(args[1]) {
		return api.Errorf(api.Invalid, "usage: drover hold --socket /path/to/hold.sock")
	}
	// The process allocates little. A collection at a memory limit replaces the collection every two minutes, which
	// would touch much of the program.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(24 << 20)
	ctx := signalContext()
	socket := args[1]
	lock, err := claimRole(filepath.Dir(filepath.Dir(socket)), "hold", "")
	if err != nil {
		return err
	}
	defer lock.Close()
	ctx, stop := context.WithCancel(ctx)
	g := newGroup(ctx)
	g.run(releaseMemory)
	err = device.RunHolder(ctx, socket)
	stop()
	return errors.Join(err, g.wait())
}
