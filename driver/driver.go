// Package driver puts the rooms of the house together: it is the only one that imports all of them.
//
// It owns the processes and what they share: the command line, the state folder, logs, metrics, the gRPC server with
// the table of error kinds, the managers that run the rooms' loops, and the supervision of the data and hold processes.
//
//	serve ──┬── embedded API server (kubeapi)      <state>/kubeconfig
//	        ├── controller and node loops, CSI doors <state>/csi.sock
//	        ├── starts, adopts, restarts ── data     replicas, engines, devices; own session
//	        └── starts, adopts, restarts ── hold     descriptors of the devices, nothing else; own session
//
// Invariants: one serve per state folder (flock); data and hold outlive serve, so that mounts do; they say who they are
// in pid files that they keep locked, so that a number used again by another process is never taken for them. The data
// process resumes what it served before it needs the API.
//
// Goroutines: those of serve and data run under one errgroup-like owner each (group), which waits for all of them.
package driver

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli"
	"drover.io/drover/driver/export"
	"drover.io/drover/driver/kubeapi"
	"drover.io/drover/driver/recover"
)

// Main runs the command line and returns the process's exit code.
func Main(args []string) int {
	// The holder is asked for first: it must touch as little memory as it can.
	if len(args) > 0 && args[0] == "hold" {
		return exit(runHold(args[1:]))
	}
	root := Command()
	root.SetArgs(args)
	return exit(root.ExecuteContext(signals()))
}

// Command returns the whole command line.
func Command() *cobra.Command {
	root := &cobra.Command{
		Use:           "drover",
		Short:         "Replicated block volumes, golden images and instant clones",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return api.Errorf(api.Invalid, "there is no command %q: see `drover --help`", args[0])
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.AddCommand(cli.Commands(export.Run)...)
	root.AddCommand(cli.RecoverCommand(recover.Run, kubeapi.Restore))
	root.AddCommand(serveCommand(), dataCommand(), holdCommand())
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return api.Errorf(api.Invalid, "%w; see `%s --help`", err, c.CommandPath())
	})
	return root
}

func exit(err error) int { return cli.Report(os.Stderr, err) }

var signalOnce sync.Once

// signals returns a context that ends with the first SIGTERM or SIGINT. A later one ends the process, whatever it does;
// one that follows at once is the same one (timeout and terminals signal a process and its group).
func signals() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	signalOnce.Do(func() {
		c := make(chan os.Signal, 2)
		signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
		// This goroutine lives as long as the process.
		go func() {
			<-c
			cancel()
			first := time.Now()
			for range c {
				if time.Since(first) > time.Second {
					os.Exit(130)
				}
			}
		}()
	})
	return ctx
}
