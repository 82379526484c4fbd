// Package driver assembles the rooms of the house. No other package imports all rooms.
//
// Package driver owns the processes and their common parts: the command line, the state folder, logs, metrics, the gRPC
// server with the table of error kinds, the managers that run the rooms' reconcilers, and the supervision of the data
// and hold processes.
//
//	serve ──┬── embedded API server (kubeapi)      <state>/kubeconfig
//	        ├── reconcilers, CSI doors        <state>/csi.sock
//	        ├── starts, adopts, restarts ── data     replicas, engines, devices; own session
//	        └── starts, adopts, restarts ── hold     descriptors of the devices, nothing else; own session
//
// Invariants: one serve per state folder (flock). The data and hold processes outlive serve, so that mounts do. Each of
// both locks a pid file, so that serve never mistakes another process with a reused pid for data or hold. The data
// process resumes its devices before the process needs the API.
//
// Goroutines: groups own the goroutines of serve and data, and wait for all of them (group).
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

// Main runs the command that args name, and returns the exit code.
func Main(args []string) int {
	// hold comes first, because hold must touch as little memory as possible.
	if len(args) > 0 && args[0] == "hold" {
		return reportError(runHold(args[1:]))
	}
	root := Command()
	root.SetArgs(args)
	return reportError(root.ExecuteContext(signalContext()))
}

// Command returns the root command with all commands.
func Command() *cobra.Command {
	root := &cobra.Command{
		Use:           "drover",
		Short:         "Replicated block volumes, golden images and instant clones",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return api.Errorf(api.Invalid, "command %q does not exist: see `drover --help`", args[0])
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

func reportError(err error) int { return cli.Report(os.Stderr, err) }

var signalOnce sync.Once

// signalContext returns a context that ends with the first SIGTERM or SIGINT. A later signal ends the process in any
// state. A signal right after the first counts as the same signal, because timeout and terminals signal a process and
// its group.
func signalContext() context.Context {
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
