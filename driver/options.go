package driver

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli"
)

const cliDefaultState = cli.DefaultStateDir

// Roles of a serve process.
const (
	roleController = "controller"
	roleNode       = "node"
	roleData       = "data"
)

// envEndpoint is the variable that gives a CSI driver its endpoint.
const envEndpoint = "CSI_ENDPOINT"

type serveOptions struct {
	roles               []string
	stateDir            string
	diskFlags           []string
	csi                 string
	kubeconfig          string
	node                string
	metrics, upload     string
	heartbeat           time.Duration
	apiListen           string
	apiNames            []string
	address             string
	logLevel, logFormat string
	leaseNamespace      string
	parsed              []api.DiskSpec
	controller, onNode  bool
	data                bool
}

func addLogFlags(f *pflag.FlagSet, level, format *string) {
	f.StringVar(level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(format, "log-format", "text", "text or json")
}

func serveCommand() *cobra.Command {
	o := &serveOptions{}
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run Drover on this machine",
		Long: "Runs Drover on this machine: the CSI driver, the reconcilers and, unless " +
			"--kubeconfig names another, an\n" +
			"API server of its own. The data path runs in processes beside it and outlives it while volumes are attached.",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.checkOptions(); err != nil {
				return err
			}
			return o.runServe(c.Context(), c)
		},
	}
	f := c.Flags()
	f.StringSliceVar(&o.roles, "roles", []string{roleController, roleNode, roleData}, "roles of this process")
	f.StringVar(&o.stateDir, "state-dir", cliDefaultState, "folder for certificates, objects, sockets and logs")
	f.StringArrayVar(&o.diskFlags, "disk", nil,
		"folder to keep data in, as path[,tag...]; several times for several disks\n"+
			"(default: the folder disk in the state folder)")
	f.StringVar(&o.csi, "csi-endpoint", "", "socket of the CSI driver (default: $"+envEndpoint+", else\n"+
		"unix://<state-dir>/csi.sock)")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "use the API server of this kubeconfig (or "+inCluster+
		") and run none")
	f.StringVar(&o.apiListen, "api-listen", "", "address[:port] of this machine at which the API server answers other\n"+
		"machines too (default: this machine alone)")
	f.StringSliceVar(&o.apiNames, "api-name", nil, "name or address by which other machines reach the API server, "+
		"the\npreferred one first (default: the address in --api-listen, or all of this machine)")
	f.StringVar(&o.address, "node-address", "", "address at which other nodes reach this node (default: the first "+
		"address of\nthis machine; none if the API server answers this machine alone)")
	f.StringVar(&o.node, "node-name", "", "name of this node (default: the host's name)")
	f.StringVar(&o.metrics, "metrics-listen", "127.0.0.1:0", "address of /metrics, /healthz and /readyz, or off")
	f.DurationVar(&o.heartbeat, "heartbeat", api.DefaultHeartbeat, "how often the node renews its heartbeat; a node\n"+
		"without a heartbeat for four times as long counts as lost")
	f.StringVar(&o.upload, "upload-listen", "127.0.0.1:0", "address that image uploads are sent to")
	f.StringVar(&o.leaseNamespace, "leader-election-namespace", "", "namespace of the controller's lease in a cluster\n"+
		"(default: that of the pod)")
	addLogFlags(f, &o.logLevel, &o.logFormat)
	for flag, values := range map[string][]string{
		"roles":      {roleController, roleNode, roleData},
		"log-level":  {"debug", "info", "warn", "error"},
		"log-format": {"text", "json"},
	} {
		// The call fails only for a second completion or an unknown flag.
		_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	return c
}

// checkOptions completes the options and refuses invalid options, before serve changes anything.
func (o *serveOptions) checkOptions() error {
	for _, r := range o.roles {
		switch r {
		case roleController:
			o.controller = true
		case roleNode:
			o.onNode = true
		case roleData:
			o.data = true
		default:
			return api.Errorf(api.Invalid, "--roles %q: use controller, node and data, separated by commas", r)
		}
	}
	if len(o.roles) == 0 {
		return api.Errorf(api.Invalid, "--roles: name at least one of controller, node and data")
	}
	if !o.controller && o.kubeconfig == "" {
		return api.Errorf(api.Invalid, "--roles %s needs the API server of a controller: name it with --kubeconfig",
			strings.Join(o.roles, ","))
	}
	if o.kubeconfig != "" && o.apiListen != "" {
		return api.Errorf(api.Invalid, "--api-listen is for the embedded API server, which does not run with --kubeconfig")
	}
	for _, p := range []*string{&o.stateDir, &o.kubeconfig} {
		if *p == "" || p == &o.kubeconfig && *p == inCluster {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return api.Errorf(api.Invalid, "%s: %w", *p, err)
		}
		*p = abs
	}
	if o.stateDir == "" {
		return api.Errorf(api.Invalid, "--state-dir is empty: name a folder")
	}
	if o.csi == "" {
		o.csi = os.Getenv(envEndpoint)
	}
	if o.csi == "" {
		o.csi = "unix://" + filepath.Join(o.stateDir, "csi.sock")
	}
	if o.node == "" {
		name, err := os.Hostname()
		if err != nil {
			return api.Errorf(api.Unavailable, "the host has no name: set one with --node-name: %w", err)
		}
		o.node = strings.ToLower(name)
	}
	if len(validation.IsDNS1123Subdomain(o.node)) > 0 {
		return api.Errorf(api.Invalid, "%q cannot be the name of a node: give one of lower-case letters, digits, '-' and "+
			"'.' with --node-name", o.node)
	}
	for _, d := range o.diskFlags {
		path, tags, _ := strings.Cut(d, ",")
		spec := api.DiskSpec{Path: path}
		if !filepath.IsAbs(path) {
			return api.Errorf(api.Invalid, "--disk %q: the path must be absolute", d)
		}
		spec.Path = filepath.Clean(path)
		if tags != "" {
			spec.Tags = strings.Split(tags, ",")
			if slices.Contains(spec.Tags, "") {
				return api.Errorf(api.Invalid, "--disk %q: an empty tag", d)
			}
		}
		if slices.ContainsFunc(o.parsed, func(p api.DiskSpec) bool { return p.Path == spec.Path }) {
			return api.Errorf(api.Invalid, "--disk %s is named twice", spec.Path)
		}
		o.parsed = append(o.parsed, spec)
	}
	if _, _, err := net.SplitHostPort(o.metrics); o.metrics != "off" && err != nil {
		return api.Errorf(api.Invalid, "--metrics-listen %q: use host:port or off", o.metrics)
	}
	if o.address != "" && net.ParseIP(o.address) == nil {
		return api.Errorf(api.Invalid, "--node-address %q is no address", o.address)
	}
	if o.heartbeat < time.Second || o.heartbeat%time.Second != 0 || o.heartbeat > time.Hour {
		return api.Errorf(api.Invalid, "--heartbeat %v: whole seconds, 1s at least", o.heartbeat)
	}
	if _, _, err := net.SplitHostPort(o.upload); err != nil {
		return api.Errorf(api.Invalid, "--upload-listen %q: use host:port", o.upload)
	}
	return nil
}
